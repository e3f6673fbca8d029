"""Durations as text, on the command line and in job files."""

from __future__ import annotations

import re

from distmm.errors import InputError

__all__ = ["seconds"]

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """Return the seconds of a duration.

    Parameters
    ----------
    text : str
        Seconds such as ``90``, units such as ``55m`` or ``1h30m``, or Slurm's forms ``01:30:00`` and ``2-12:00:00``.

    Raises
    ------
    InputError
        For any other text.

    Examples
    --------
    >>> from distmm.durations import seconds
    >>> seconds("1h30m") == seconds("01:30:00") == 5400
    True
    """
    if clock := re.fullmatch(r"(?:(\d+)-(?=\d+:\d+:))?((?:\d+:)?\d+:\d\d)", text):
        total = 0
        for part in clock[2].split(":"):
            total = total * 60 + int(part)
        return float(total + int(clock[1] or 0) * UNITS["d"])
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InputError(f"{text!r} is no time: write it as 90s, 55m, 1h30m or 01:30:00")
    return sum(float(number) * UNITS[unit or "s"] for number, unit in parts)
