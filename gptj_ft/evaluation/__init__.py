"""Score a model, or the outputs of any system, on rows."""
