"""Train, evaluate and generate on several ranks. The packages below never import it."""
