"""Options of a run: their types and defaults, presets, precedence, the run folder."""
