"""Read rows from files: one module per format."""
