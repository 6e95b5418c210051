"""Read and write the checkpoint formats of other programs. Only `gptj_ft.checkpoints.open` imports from here."""
