"""Colours of the dashboard's page and the report, for light and dark backgrounds."""

from __future__ import annotations

import colorsys
from functools import cache
from pathlib import Path

from distmm.telemetry.activity import Kind

# The HTML of page and report, the page's style sheet and its script.
PAGES = Path(__file__).parent / "pages"

# Background, text, secondary text and lines. Text has a contrast of at least 4.5 to its background (WCAG AA).
LIGHT = {"ground": "#ffffff", "ink": "#1d1d1f", "muted": "#5f6368", "line": "#dadce0", "bar": "#eeeeee"}
DARK = {"ground": "#16181c", "ink": "#e8eaed", "muted": "#a8adb4", "line": "#3c4043", "bar": "#24272c"}

# Colours of data have a contrast of at least 3 to both backgrounds. Colour-blind people can tell them apart (blue,
# orange and vermilion of Okabe and Ito).
DATA = "#2e86c8"
MARK = "#8a6fd1"
LIMIT = "#d55e00"
AGAIN = "#e08a00"
WRONG = "#e0245e"
READ = "#1f9a73"
WRITTEN = "#c77700"
REJECTED = "#b14fc5"

# Colour of blocks that no worker of this run has made, and of silent workers.
NOBODY = "#80868b"

# Names and colours of the kinds of activity; steps have the colour of their worker.
ACTIVITIES: dict[Kind, tuple[str, str]] = {
    "multiply": ("", ""),
    "receive": ("transfers", MARK),
    "load": ("reads of A and B", READ),
    "operands": ("the operands' own tasks", DATA),
    "write": ("checks and writes of C", WRITTEN),
}

# Relative luminances of workers' colours, used in turn. They have a contrast of at least 3 to both backgrounds, and
# neighbours still differ in a photocopy.
LUMINANCES = (0.21, 0.28, 0.15)


@cache
def worker_color(number: int) -> str:
    """Return the colour of a worker by its number, the same in all figures and reports of a scheduler.

    The hues of consecutive numbers are far apart.
    """
    golden = (5**0.5 - 1) / 2
    hue, wanted = (0.57 + number * golden) % 1.0, LUMINANCES[number % len(LUMINANCES)]
    low, high = 0.0, 1.0
    for _ in range(20):  # bisection: luminance grows with lightness
        middle = (low + high) / 2
        if _luminance(colorsys.hls_to_rgb(hue, middle, 0.6)) < wanted:
            low = middle
        else:
            high = middle
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, low, 0.6))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _luminance(color: tuple[float, float, float]) -> float:
    """Return the relative luminance of an sRGB colour, as WCAG 2 defines it."""
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
