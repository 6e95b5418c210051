"""Commands: each parses, calls one API function and prints. Commands import their modules when they run."""
