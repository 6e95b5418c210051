"""The engine: layers pass through the device one at a time. Start with `step`."""
