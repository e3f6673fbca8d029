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

# Heights of the grid of C, and of each other figure, in pixels.
BLOCKS, OTHERS = 430, 172

# Milliseconds between two updates, up to `MANY` workers and beyond. An update for 256 workers is 60 kB.
UPDATE_MILLISECONDS, SLOW_MILLISECONDS, MANY = 500, 1000, 64


def install(scheduler: Scheduler) -> None:
    """Add the page ``/distmm`` to a scheduler's dashboard."""
    dashboard_server.add_page(scheduler, "distmm", _page)


def _page(scheduler: Scheduler, extra: dict[str, Any], doc: Document) -> None:
    """Fill a page with the table of products, and with the text and the figures of one of them."""
    from bokeh.layouts import column, row
    from bokeh.models import CustomJS, Div

    from distmm.telemetry import charts, facts
    from distmm.telemetry.dashboard_figures import Bars, Curves
    from distmm.telemetry.dashboard_grid import Blocks, legend

    asked, wide = _address_arguments(doc), {"sizing_mode": "stretch_width"}
    table, head, key = (
        Div(name=f"distmm-{name}", stylesheets=[facts.style()], **wide) for name in ("products", "head", "legend")
    )
    blocks, others = Blocks(name="distmm-blocks", height=BLOCKS, **wide), {"height": OTHERS, **wide}
    panes: list[Any] = [
        Curves("rate", "Rate over time", charts.rate, name="distmm-rate-over-time", **others),
        Curves("memory", "Memory of blocks over time", charts.memory, name="distmm-memory-over-time", **others),
        *(Bars(quantity, name=f"distmm-{quantity}", **others) for quantity in ("rate", "memory", "time", "transfers")),
    ]
    for pane in panes:
        pane.root.stylesheets = [*pane.root.stylesheets, CELL]
    left = column(blocks.root, key, stylesheets=[SIDE], **wide)
    right = row([pane.root for pane in panes], stylesheets=[SIDE, WRAP], **wide)
    figures = row(left, right, name="distmm-figures", stylesheets=[WRAP], **wide)

    def update() -> None:
        plugin, now = scheduler.plugins.get("distmm-telemetry"), time.time()
        records: dict[str, Record] = plugin.records if plugin else {}
        record = records.get(asked.get("product", "")) or next(reversed(list(records.values())), None)
        figures.visible = record is not None
        key.text, head.text = legend(record), facts.head(record, now)
        if record is not None:
            table.text = facts.products(records, record.product, asked, now)
            for pane in (blocks, *panes):
                pane.update(record, now)

    doc.add_root(column([table, head, figures], name="distmm", **wide))
    dashboard_server.dress(doc, "distmm", extra)
    update()
    doc.add_periodic_callback(update, UPDATE_MILLISECONDS if len(scheduler.workers) <= MANY else SLOW_MILLISECONDS)
    roots = [pane.root for pane in (blocks, *panes)]
    arguments = {"figures": roots, "light": theme.LIGHT, "dark": theme.DARK}
    doc.js_on_event(
        "document_ready", CustomJS(args=arguments, code=(theme.PAGES / "colours.js").read_text(encoding="utf-8"))
    )


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
