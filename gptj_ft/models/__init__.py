"""Architectures in PyTorch and as data; no input or output."""
