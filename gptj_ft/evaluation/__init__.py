"""Run a model over rows: evaluate it, predict labels, generate answers."""
