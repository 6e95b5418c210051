"""Open, convert, compare, download and push model folders and foreign checkpoint formats."""
