"""Colours of the dashboard's page and the report, for light and dark backgrounds."""

from __future__ import annotations

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

# Colours of workers, used in turn. They have a contrast of at least 3 to both backgrounds. Neighbours differ in hue,
# and in luminance, so also in a photocopy.
WORKERS = (
    "#3084c1", "#8a9826", "#ac31c4", "#24905f", "#d57757", "#595ed6", "#478f24", "#d969af",
    "#20777f", "#947d25", "#ac7ade", "#1f7c33", "#d4535e", "#6691d9", "#58751d", "#cf3fc9",
    "#29a284", "#9c5d27", "#816edb", "#39a529", "#c4316e", "#2b87ad", "#959525", "#a239cd",
    "#249051", "#d97465", "#4c62d2", "#548d23", "#d967bc", "#1e7874", "#a07828", "#a27edf",
)  # fmt: skip
