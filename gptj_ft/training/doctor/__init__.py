"""Check a machine and its device: facts, parity, streams, speed, memory, and a verdict."""
