"""Declare and resolve the options of a run: types, defaults, presets, precedence; the run folder."""
