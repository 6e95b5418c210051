"""Checkpoint formats: each file reads and writes one, tensor by tensor."""
