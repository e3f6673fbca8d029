"""Numbers, sizes, times and dates as text (three digits, decimal prefix, unit); names in natural order.

It also reads whole numbers of callers, and the durations of command lines and job files.
"""

from __future__ import annotations

import math
import re
import time
from operator import index
from typing import Any

from distmm.errors import InputError

PREFIXES = ("", "k", "M", "G", "T", "P", "E")

DAY = 86400

# Units of time axes.
TIME_UNITS = {"d": DAY, "h": 3600, "min": 60, "s": 1}

# Most letters of a shortened title.
LONGEST_TITLE = 48

# Seconds of the units that users write.
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": DAY}


def scaled(value: float, unit: str) -> str:
    """Return a value with three significant digits and a decimal prefix, as in ``1.23 GB`` (1 GB = 1e9 bytes)."""
    scale, letter = prefix(value)
    return f"{value / scale:.3g} {letter}{unit}"


def prefix(value: float) -> tuple[float, str]:
    """Return scale and letter of the decimal prefix for a value, as in ``(1e9, "G")``."""
    power = 0
    # With three digits 999.5 prints as 1000, so it gets the next prefix.
    while abs(value) >= 999.5 * 1000**power and power < len(PREFIXES) - 1:
        power += 1
    return 1000.0**power, PREFIXES[power]


def size(nbytes: float) -> str:
    """Return a number of bytes as text, as in ``4.29 GB``."""
    return scaled(nbytes, "B")


def count(number: int, what: str) -> str:
    """Return a number of things as text, as in ``1 block of C`` or ``4 blocks of C``."""
    name, of, rest = what.partition(" of ")
    return f"{number} {name}{'s' * (number != 1)}{of}{rest}"


def whole(value: Any) -> int | None:
    """Return a whole number of Python or NumPy as an int. None for other values, such as True and arrays of several."""
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def duration(seconds: float) -> str:
    """Return a time as text, as in ``3.21 s``, ``4 min 05 s`` or ``2 h 10 min``."""
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


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
    >>> from distmm.units import seconds
    >>> seconds("1h30m") == seconds("01:30:00") == 5400
    True
    """
    if clock := re.fullmatch(r"(?:(\d+)-(?=\d+:\d+:))?((?:\d+:)?\d+:\d\d)", text):
        total = 0
        for part in clock[2].split(":"):
            total = total * 60 + int(part)
        return float(total + int(clock[1] or 0) * SECONDS["d"])
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InputError(f"{text!r} is no time: write it as 90s, 55m, 1h30m or 01:30:00")
    return sum(float(number) * SECONDS[unit or "s"] for number, unit in parts)


def date(at: float) -> str:
    """Return local date and time of `at` (seconds since the epoch), as in ``2026-11-24 19:30:05 +0000``."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(at))


def clock(at: float) -> str:
    """Return the local time of day of `at` (seconds since the epoch), as in ``19:30:05``."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def span(start: float, stop: float) -> str:
    """Return a period as text, as in ``from 19:30:05 to 19:31:45 (1 min 40 s)``."""
    return f"from {clock(start)} to {clock(stop)} ({duration(stop - start)})"


def time_unit(seconds: float) -> tuple[int, str]:
    """Return the unit in which an axis up to `seconds` is labelled: its length in seconds, and its name."""
    return next((length, name) for name, length in TIME_UNITS.items() if seconds >= 2 * length or length == 1)


def ticks(top: float, most: int = 5) -> list[float]:
    """Return at most ``most + 1`` round numbers from 0 to `top`: multiples of 1, 2 or 5 times a power of ten."""
    least = max(top, 1e-9) / most
    power = math.floor(math.log10(least))
    step = next(step for step in (float(f"{digit}e{power}") for digit in (1, 2, 5, 10)) if step >= least * (1 - 1e-9))
    return [step * at for at in range(int(top / step * (1 + 1e-9)) + 1)]


def shortened(title: str) -> str:
    """Return the end of a long path, or the name of an array with the first letters of its token."""
    name, _, token = title.rpartition("-")
    if name and len(token) == 32:
        return f"{name}-{token[:6]}"
    return title if len(title) <= LONGEST_TITLE else f"...{title[3 - LONGEST_TITLE :]}"


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts ``worker-10`` after ``worker-9``."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part)
