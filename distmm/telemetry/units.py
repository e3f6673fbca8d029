"""Figures as people read them (three digits, decimal prefix, unit), and names in natural order."""

from __future__ import annotations

import re

__all__ = ["duration", "natural", "prefix", "rate", "scaled", "size"]

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def scaled(value: float, unit: str) -> str:
    """Three significant digits with a decimal prefix, as in ``1.23 GB`` (1 GB = 1e9 bytes)."""
    scale, letter = prefix(value)
    return f"{value / scale:.3g} {letter}{unit}"


def prefix(value: float) -> tuple[float, str]:
    """Scale and letter of the decimal prefix with which `value` is written, as ``(1e9, "G")``."""
    power = 0
    # 999.5 prints as 1000 with three digits: that is the next prefix already.
    while abs(value) >= 999.5 * 1000**power and power < len(PREFIXES) - 1:
        power += 1
    return 1000.0**power, PREFIXES[power]


def size(nbytes: float) -> str:
    """Bytes, as in ``4.29 GB``."""
    return scaled(nbytes, "B")


def rate(flops: float, seconds: float) -> str:
    """Operations over seconds, as in ``52.5 TFLOP/s``."""
    return scaled(flops / max(seconds, 1e-9), "FLOP/s")


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, as in ``3.21 s``, ``4 min 05 s`` or ``2 h 10 min``."""
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key with which worker 10 comes after worker 9."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part)
