"""The page ``/distmm`` of Dask's dashboard, its entry in the navigation bar, and the same page for JupyterLab.

`distmm.telemetry.scheduler.Telemetry` adds it with the first product of a client.
``dask scheduler --preload distmm.telemetry.preload`` adds it when the scheduler starts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from distributed.scheduler import Scheduler

from distmm.telemetry import dashboard_server, theme

if TYPE_CHECKING:
    from bokeh.document import Document

    from distmm.telemetry.record import Record

# Height of the grid of C in pixels.
BLOCKS = 430

# Milliseconds between two updates of texts and grid, up to `MANY` workers and beyond, and of the other figures. For 256
# workers these have 150 kB, and take 38 ms on the scheduler.
UPDATE_MILLISECONDS, SLOW_MILLISECONDS, MANY, FIGURES_MILLISECONDS = 500, 1000, 64, 2000


def page(scheduler: Scheduler, extra: dict[str, Any], doc: Document) -> None:
    """Fill a page with the table of products, and with the text and the figures of one of them."""
    from bokeh.layouts import column, row
    from bokeh.models import CustomJS, Div

    from distmm.telemetry import facts
    from distmm.telemetry.dashboard_figures import PANES
    from distmm.telemetry.dashboard_grid import Blocks, legend

    asked, wide = _address_arguments(doc), {"sizing_mode": "stretch_width"}
    table, head, key = (
        Div(name=f"distmm-{name}", stylesheets=[facts.style()], **wide) for name in ("products", "head", "legend")
    )
    blocks = Blocks(name="distmm-blocks", height=BLOCKS, **wide)
    cell = {"stylesheets": [facts.style(), CELL], "margin": 0, **wide}
    panes = {name: Div(name=f"distmm-{name}", **cell) for name in PANES}
    left = column(blocks.root, key, stylesheets=[SIDE], **wide)
    right = row(list(panes.values()), stylesheets=[SIDE, WRAP], **wide)
    figures = row(left, right, name="distmm-figures", stylesheets=[WRAP], **wide)

    def found() -> tuple[dict[str, Record], Record | None]:
        plugin = scheduler.plugins.get("distmm-telemetry")
        records: dict[str, Record] = plugin.records if plugin else {}
        return records, records.get(asked.get("product", "")) or next(reversed(list(records.values())), None)

    def update() -> None:
        (records, record), now = found(), time.time()
        figures.visible = record is not None
        key.text, head.text = legend(record), facts.head(record, now)
        if record is not None:
            table.text = facts.products(records, record.product, asked, now)
            blocks.update(record)

    def draw() -> None:
        if (record := found()[1]) is not None:
            for name, pane in panes.items():
                pane.text = PANES[name](record, time.time())

    doc.add_root(column([table, head, figures], name="distmm", **wide))
    dashboard_server.dress(doc, "distmm", extra)
    for show, pause in (
        (update, UPDATE_MILLISECONDS if len(scheduler.workers) <= MANY else SLOW_MILLISECONDS),
        (draw, FIGURES_MILLISECONDS),
    ):
        show()
        doc.add_periodic_callback(show, pause)
    arguments = {"figure": blocks.root, "light": theme.LIGHT, "dark": theme.DARK}
    doc.js_on_event("document_ready", CustomJS.from_file(theme.PAGES / "colours.js", **arguments))


def _address_arguments(doc: Document) -> dict[str, str]:
    """Return the arguments of the page's address: ``product`` and ``theme``."""
    context = doc.session_context
    arguments = context.request.arguments if context is not None and context.request is not None else {}
    return {name: arguments[name][0].decode() for name in ("product", "theme") if arguments.get(name)}


# The two halves of the page are next to each other if the window has room for the minimum width of both. Otherwise the
# second is below the first. The figures of a half follow the same rule.
WRAP = ":host { flex-wrap: wrap; align-content: flex-start; gap: 4px 8px; }"
SIDE = ":host { flex: 1 1 420px; min-width: min(420px, 100%); align-self: flex-start; }"
CELL = ":host { flex: 1 1 300px; min-width: min(300px, 100%); }"
