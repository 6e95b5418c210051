"""Tasks of lm-eval, on a streamed model."""
