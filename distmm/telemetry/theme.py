"""Colours of the dashboard's page and the report, for light and dark backgrounds."""

from __future__ import annotations

import colorsys

__all__ = ["AGAIN", "DARK", "DATA", "LIGHT", "LIMIT", "MARK", "WRONG", "owner_colors"]

# Ground, text, secondary text and lines. Text has a contrast of at least 4.5 to its ground (WCAG AA).
LIGHT = {"ground": "#ffffff", "ink": "#1d1d1f", "muted": "#5f6368", "line": "#dadce0", "bar": "#eeeeee"}
DARK = {"ground": "#16181c", "ink": "#e8eaed", "muted": "#a8adb4", "line": "#3c4043", "bar": "#24272c"}

# Data: at least 3 to both grounds, and told apart by the colour-blind (blue, orange, vermilion of Okabe and Ito).
DATA = "#2e86c8"
MARK = "#8a6fd1"
LIMIT = "#d55e00"
AGAIN = "#e08a00"
WRONG = "#e0245e"


def owner_colors(count: int) -> list[str]:
    """Colours of `count` workers, evenly spaced in hue: neighbours in rank look alike where there are many."""
    colors = []
    for rank in range(count):
        red, green, blue = colorsys.hls_to_rgb((0.57 + rank / max(1, count)) % 1.0, 0.52, 0.55)
        colors.append(f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}")
    return colors
