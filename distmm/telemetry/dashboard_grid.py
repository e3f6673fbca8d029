"""The grid of C on the dashboard: the owner, the progress and the incidents of each block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from bokeh.models import BasicTicker, ColumnDataSource, Range1d
from bokeh.plotting import figure

from distmm import templates, units
from distmm.telemetry import theme
from distmm.telemetry.record import Record

# Most cells of the grid of C. In a larger grid a cell shows several blocks. 64 x 64 cells are about 8 pixels wide on a
# laptop, and an update takes 40 kB.
MOST_CELLS = 4096

# Up to so many workers, the legend names them.
NAMED_WORKERS = 32

# Opacity of a block of which no step is done.
EMPTY = 0.1


def cells(record: Record) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the row and the column of each block of C, in cells of `side` x `side` blocks, and the side.

    The matrices of a batch lie side by side, in an outline close to a square. They are a cell apart, if each block has
    a cell of its own.
    """
    rows, columns = record.rows, record.columns
    matrices, side = record.chains // (rows * columns), math.ceil(math.sqrt(max(1, record.chains / MOST_CELLS)))
    across, gap = max(1, round(math.sqrt(matrices * rows / columns))), int(side == 1)
    matrix, place = np.divmod(np.arange(record.chains), rows * columns)
    row = (matrix // across * (rows + gap) + place // columns) // side
    return row, (matrix % across * (columns + gap) + place % columns) // side, side


class Blocks:
    """The grid of C. The colour of a cell shows its owner, its opacity the fraction of its steps that is done."""

    def __init__(self, **sizing: Any) -> None:
        columns = ("x", "y", "fill", "alpha", "edge", "width", "name", "owner", "done", "state")
        self.source = ColumnDataSource({column: [] for column in columns})
        self.root = figure(
            title="Blocks of C", x_range=Range1d(-0.5, 1), y_range=Range1d(1, -0.5), tools="", toolbar_location=None,
            x_axis_location="above",
            tooltips=[("block", "@name"), ("owner", "@owner"), ("done", "@done{0 %}"), ("", "@state")], **sizing,
        )  # fmt: skip
        self.root.grid.visible = False
        self.root.axis.ticker = BasicTicker(desired_num_ticks=4, min_interval=1)  # the numbers of blocks
        self.cells = self.root.rect(
            x="x", y="y", width=1, height=1, source=self.source,
            fill_color="fill", fill_alpha="alpha", line_color="edge", line_width="width",
        )  # fmt: skip

    def update(self, record: Record) -> None:
        """Redraw the cells."""
        row, column, side = cells(record)
        high, wide = int(row.max()) + 1, int(column.max()) + 1
        cell = row * wide + column
        first, cell, members = np.unique(cell, return_index=True, return_inverse=True, return_counts=True)[1:]

        def some(flags: np.ndarray) -> np.ndarray:
            """Whether a flag is set for any block of each cell; a mirror image has the flags of its source."""
            return np.bincount(cell, weights=flags[record.source]) > 0

        again, refuted, resumed = some(record.again), some(record.refuted), some(record.resumed)
        rejected, mirrored = some(record.rejections) & ~refuted, np.bincount(cell, weights=record.mirrored) == members
        owners = [record.owners[record.source[chain]] for chain in first]
        done = np.bincount(cell, weights=record.progress) / members
        more = " and its neighbours, in one cell" if side > 1 else ""
        edges = [(refuted, theme.WRONG), (rejected, theme.REJECTED), (again, theme.AGAIN)]
        self.source.data = {
            "x": column[first] * side + (side - 1) / 2,
            "y": row[first] * side + (side - 1) / 2,
            "fill": [record.color(owner) if owner else theme.NOBODY for owner in owners],
            "alpha": EMPTY + (1 - EMPTY) * done,
            "edge": np.select([flags for flags, _ in edges], [color for _, color in edges], theme.NOBODY),
            "width": np.where(refuted | rejected | again, 3.0, 0.4),
            "name": [record.block(chain) + more for chain in first],
            "owner": [owner or "an earlier run" for owner in owners],
            "done": done,
            "state": [
                ", ".join(word for word, holds in zip(STATES, flags, strict=True) if holds)
                for flags in zip(mirrored, resumed, again, rejected, refuted, strict=True)
            ],
        }
        self.cells.glyph.width = self.cells.glyph.height = 0.92 * side
        self.root.x_range.end, self.root.y_range.start = (n * side - 0.5 for n in (wide, high))
        self.root.axis.visible = not record.batches


# What the tooltip of a cell says, in the order of its flags.
STATES = ("mirrored", "from disk", "lost and computed again", "rejected and computed again", "failed its check")


def legend(record: Record | None) -> str:
    """Return the legend of the grid's colours as HTML; all figures use the same colours."""
    names = [] if record is None else sorted(filter(None, record.lanes), key=units.natural)
    workers = {} if record is None else {name: record.color(name) for name in names}
    return templates.filled(
        theme.PAGES / "legend.html", workers=workers, named=len(names) <= NAMED_WORKERS, empty=EMPTY, theme=theme
    )
