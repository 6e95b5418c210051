"""Forecast memory, disk and time of a run before it starts."""
