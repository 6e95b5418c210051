"""Check a machine and its device (`doctor`), and prove the claims of weight streaming on it (`prove`)."""
