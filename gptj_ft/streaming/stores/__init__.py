"""Stores hold the tensors of layers on the device, in host memory or on disk."""
