"""Generate text with a streamed model."""
