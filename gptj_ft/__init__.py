"""Fine-tune GPT-J 6B on the one machine you have, by weight streaming."""

__version__ = "0.1.0"
