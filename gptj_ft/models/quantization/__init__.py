"""Quantize frozen matrices, and restore their values on the way to the computation."""
