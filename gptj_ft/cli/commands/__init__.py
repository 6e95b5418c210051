"""The commands, one function each: parse, one call, print. What a command needs is imported inside it."""
