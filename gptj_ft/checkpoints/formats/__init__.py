"""Checkpoint formats: each module reads or writes one, tensor by tensor."""
