"""One run from its options to the exported model."""
