"""Print and draw on a terminal."""
