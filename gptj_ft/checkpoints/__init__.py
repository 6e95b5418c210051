"""Model folders and foreign checkpoint formats: open, convert, compare, download, push."""
