"""Several processes of one run: find each other, tell each other facts and errors, hand tensors on."""
