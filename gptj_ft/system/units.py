"""Format bytes and durations for people."""

from __future__ import annotations


def gigabytes(size: float) -> str:
    """Format bytes: ``1.5 GB``."""
    if size >= 1e12:
        return f"{size / 1e12:.1f} TB"
    if size >= 1e8:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1e5 or not size else f"{size / 1e3:.1f} kB"


def gibibytes(size: float) -> str:
    """Format bytes in binary units, as for memory limits: ``3 GiB``."""
    return f"{size / 2**30:.3g} GiB"


def clock(seconds: float) -> str:
    """Format a duration: ``45 s``, ``3 min``, ``2 h 05 min``, ``3 d 4 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
