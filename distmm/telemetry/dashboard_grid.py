"""The grid of C on the dashboard: the owner, the progress and the incidents of each block."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d
from bokeh.plotting import figure

from distmm import templates, units
from distmm.telemetry import theme
from distmm.telemetry.dashboard_figures import Pane
from distmm.telemetry.record import Record

# Most cells of the grid of C. In a larger grid a cell shows several blocks. 64 x 64 cells are about 8 pixels wide on a
# laptop, and an update takes 40 kB.
MOST_CELLS = 4096

# Up to these numbers, cells show the name of their owner, matrices of a batch show their index, and the legend names
# the workers.
NAMED_CELLS, NAMED_MATRICES, NAMED_WORKERS = 64, 36, 32

# Gap between the matrices of a batch, as a fraction of a matrix's longer edge.
GAP = 0.12

# Opacity of a block of which no step is done.
EMPTY = 0.1

# Bokeh's hatch patterns; a blank means no pattern.
NONE, MIRRORED, RESUMED = " ", "right_diagonal_line", "dot"


class Layout(NamedTuple):
    """Positions of the cells.

    Each matrix of a batch has `high` x `wide` cells of `side` x `side` blocks, and `across` matrices form a line. If a
    batch has more matrices than `MOST_CELLS`, `together` matrices share a cell.
    """

    side: int
    high: int
    wide: int
    across: int
    together: int
    gap: float

    @classmethod
    def of(cls, record: Record) -> Layout:
        """Choose the layout for a product whose outline is closest to a square."""
        side = math.ceil(math.sqrt(max(1, record.chains / MOST_CELLS)))
        high, wide = math.ceil(record.rows / side), math.ceil(record.columns / side)
        batch = record.chains // (record.rows * record.columns)
        together = math.ceil(batch * high * wide / MOST_CELLS) if high * wide == 1 else 1
        tiles = math.ceil(batch / together)
        across = min(tiles, max(1, round(math.sqrt(tiles * high / wide))))
        return cls(side, high, wide, across, together, GAP * max(high, wide) if tiles > 1 else 0.0)

    def place(self, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the left and upper edges of matrices, by their number in the batch."""
        return (
            tiles % self.across * (self.wide + self.gap) + self.gap,
            tiles // self.across * (self.high + self.gap) + self.gap,
        )


class Blocks(Pane):
    """The grid of C. The colour of a cell shows its owner, its opacity the fraction of its steps that is done."""

    def __init__(self, **sizing: Any) -> None:
        columns = ("x", "y", "fill", "alpha", "edge", "width", "hatch", "name", "text", "owner", "done", "state")
        self.source = ColumnDataSource({column: [] for column in columns})
        self.frames = ColumnDataSource({column: [] for column in ("x", "y", "width", "height", "left", "top", "text")})
        self.hatched = ColumnDataSource({column: [] for column in ("x", "y", "hatch")})
        self.shape: tuple[object, ...] = ()
        self.root = figure(
            title="Blocks of C", x_range=Range1d(0, 1), y_range=Range1d(1, 0), tools="", toolbar_location=None,
            x_axis_location="above", **sizing,
        )  # fmt: skip
        self.root.grid.visible = False
        cells = self.root.rect(
            x="x", y="y", width=0.92, height=0.92, source=self.source,
            fill_color="fill", fill_alpha="alpha", line_color="edge", line_width="width",
        )  # fmt: skip
        self.root.text(
            x="x", y="y", text="text", source=self.source, text_align="center", text_baseline="middle",
            text_font_size="11px", text_color=theme.LIGHT["ink"],
        )  # fmt: skip
        # Matrices of a batch: a frame around each, and its index above it.
        self.root.rect(
            x="x", y="y", width="width", height="height", source=self.frames, fill_color=None,
            line_color=theme.LIGHT["muted"], line_width=1.5, tags=["ink"],
        )  # fmt: skip
        self.root.text(
            x="left", y="top", text="text", source=self.frames, text_baseline="bottom", text_font_size="11px",
            text_color=theme.LIGHT["ink"],
        )  # fmt: skip
        # A renderer for hatched cells only: Bokeh makes a pattern for each cell of a renderer at every update.
        self.root.rect(
            x="x", y="y", width=0.92, height=0.92, source=self.hatched, fill_color=None, line_color=None,
            hatch_pattern="hatch", hatch_color=theme.LIGHT["ink"], hatch_alpha=0.5, hatch_scale=7, hatch_weight=1,
        )  # fmt: skip
        self.root.add_tools(
            HoverTool(
                renderers=[cells],
                tooltips=[("block", "@name"), ("owner", "@owner"), ("done", "@done{0 %}"), ("", "@state")],
            )
        )

    def update(self, record: Record, now: float) -> None:
        """Redraw the cells."""
        layout = Layout.of(record)
        matrix, place = np.divmod(np.arange(record.chains), record.rows * record.columns)
        tile = matrix // layout.together
        row, column = (at // layout.side for at in np.divmod(place, record.columns))
        cell = (tile * layout.high + row) * layout.wide + column
        first, members = np.unique(cell, return_index=True, return_counts=True)[1:]
        left, top = layout.place(tile[first])

        def some(flags: np.ndarray) -> np.ndarray:
            """Whether a flag is set for any block of each cell; a mirror image has the flags of its source."""
            return np.bincount(cell, weights=flags[record.source]) > 0

        again, refuted, resumed = some(record.again), some(record.refuted), some(record.resumed)
        rejected, mirrored = some(record.rejections) & ~refuted, np.bincount(cell, weights=record.mirrored) == members
        owners = [record.owners[record.source[chain]] for chain in first]
        done = np.bincount(cell, weights=record.progress) / members
        several = layout.together * layout.side**2 > 1
        more = " and its neighbours, in one cell" if several else ""
        edges = [(refuted, theme.WRONG), (rejected, theme.REJECTED), (again, theme.AGAIN)]
        named = record.chains <= NAMED_CELLS
        self.source.data = {
            "x": left + column[first] + 0.5,
            "y": top + row[first] + 0.5,
            "fill": [record.color(owner) if owner else theme.NOBODY for owner in owners],
            "alpha": EMPTY + (1 - EMPTY) * done,
            "edge": np.select([flags for flags, _ in edges], [color for _, color in edges], theme.NOBODY),
            "width": np.where(refuted | rejected | again, 3.0, 0.4),
            "hatch": np.select([resumed, mirrored], [RESUMED, MIRRORED], NONE),
            "name": [record.block(chain) + more for chain in first],
            "text": owners if named else [""] * len(first),
            "owner": [owner or "an earlier run" for owner in owners],
            "done": done,
            "state": [
                ", ".join(word for word, holds in zip(STATES, flags, strict=True) if holds)
                for flags in zip(mirrored, resumed, again, rejected, refuted, strict=True)
            ],
        }
        hatched = mirrored | resumed
        self.hatched.data = {column: np.asarray(self.source.data[column])[hatched] for column in self.hatched.data}
        if self.shape != (record.product, layout):
            self.shape = (record.product, layout)
            self._frame(record, layout, int(tile[-1]) + 1)

    def _frame(self, record: Record, layout: Layout, tiles: int) -> None:
        """Fit the axes to the layout, and draw a frame around each matrix of a batch."""
        left, top = layout.place(np.arange(tiles if tiles > 1 else 0))
        named = len(left) <= NAMED_MATRICES and layout.together == 1
        indices = zip(*np.unravel_index(np.arange(len(left)), record.batches or (1,)), strict=True)
        self.frames.data = {
            "x": left + layout.wide / 2,
            "y": top + layout.high / 2,
            "width": np.full(len(left), layout.wide + layout.gap / 4),
            "height": np.full(len(left), layout.high + layout.gap / 4),
            "left": left,
            "top": top - layout.gap / 8,
            "text": [f"C[{', '.join(map(str, index))}]" if named else "" for index in indices],
        }
        across, lines = layout.across, math.ceil(tiles / layout.across)
        self.root.x_range.update(start=0, end=across * (layout.wide + layout.gap) + layout.gap)
        self.root.y_range.update(start=lines * (layout.high + layout.gap) + layout.gap, end=0)
        for axis, count in ((self.root.xaxis[0], layout.wide), (self.root.yaxis[0], layout.high)):
            axis.visible = tiles == 1
            at = sorted({0, count // 2, count - 1} if count > 8 else range(count))
            axis.ticker = FixedTicker(ticks=[x + 0.5 for x in at])
            axis.major_label_overrides = {x + 0.5: str(x * layout.side) for x in at}


# Entries of the legend, in the order of a cell's flags, with the CSS of their swatches.
STATES = {
    "mirrored": f"background: repeating-linear-gradient(45deg, var(--ink) 0 1px, transparent 1px 4px), {theme.DATA}",
    "from disk": f"background: radial-gradient(var(--ink) 1px, transparent 1.5px) 0 0 / 4px 4px, {theme.NOBODY}",
    "lost and computed again": f"border: 3px solid {theme.AGAIN}",
    "rejected and computed again": f"border: 3px solid {theme.REJECTED}",
    "failed its check": f"border: 3px solid {theme.WRONG}",
}


def legend(record: Record | None) -> str:
    """Return the legend of the grid's colours and patterns as HTML; all figures use the same colours."""
    progress = [("nothing done", f"background: {theme.DATA}; opacity: {EMPTY}"), ("done", f"background: {theme.DATA}")]
    entries = [*progress, *STATES.items()]
    names = [] if record is None else sorted(filter(None, record.lanes), key=units.natural)
    if record is not None and len(names) <= NAMED_WORKERS:
        entries += [(f"worker {name}", f"background: {record.color(name)}") for name in names]
    elif names:
        entries.append(
            (f"{len(names)} workers: each has its colour; the pointer on a block shows its owner's name", "")
        )
    return templates.filled(theme.PAGES / "legend.html", entries=entries)
