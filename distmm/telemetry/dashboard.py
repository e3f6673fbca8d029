"""The page ``/distmm`` of Dask's dashboard, its entry in the navigation bar, and its plots for JupyterLab.

`distmm.telemetry.scheduler.Telemetry` adds them with the first product of a client.
``dask scheduler --preload distmm.telemetry.preload`` adds them when the scheduler starts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distributed.scheduler import Scheduler

from distmm.telemetry import dashboard_server, theme

if TYPE_CHECKING:
    from bokeh.document import Document

    from distmm.telemetry.dashboard_figures import Pane
    from distmm.telemetry.record import Record

# The figures of the page, in order. Each one is also a separate plot for JupyterLab.
PLOTS = ("blocks", "rate over time", "memory over time", "rate", "memory", "time", "transfers")
HEIGHTS = {"blocks": 430}

# Milliseconds between two updates, up to `MANY` workers and beyond. An update for 256 workers is 60 kB.
UPDATE_MILLISECONDS, SLOW_MILLISECONDS, MANY = 500, 1000, 64


def install(scheduler: Scheduler) -> None:
    """Add the page ``/distmm`` to a scheduler's dashboard, and each of its figures as a separate plot."""
    plots = {f"distmm {name}": functools.partial(_page, [name]) for name in PLOTS}
    dashboard_server.add_pages(scheduler, "distmm", functools.partial(_page, PLOTS), plots)


def _page(names: Sequence[str], scheduler: Scheduler, extra: dict[str, Any], doc: Document) -> None:
    """Fill a page with figures of one product: all of them below the table of products and text, or one that is alone.

    A figure that is alone fills its pane of JupyterLab.
    """
    from bokeh.layouts import column, row
    from bokeh.models import CustomJS, Div

    from distmm.telemetry import facts
    from distmm.telemetry.dashboard_grid import legend

    asked, whole = _address_arguments(doc), len(names) > 1
    sizing = {"sizing_mode": "stretch_width" if whole else "stretch_both"}
    panes = {name: _pane(name, **sizing, **({"height": HEIGHTS.get(name, 172)} if whole else {})) for name in names}
    table, head, key = (
        Div(sizing_mode="stretch_width", name=f"distmm-{name}", stylesheets=[facts.style()])
        for name in ("products", "head", "legend")
    )

    def update() -> None:
        plugin, now = scheduler.plugins.get("distmm-telemetry"), time.time()
        records: dict[str, Record] = plugin.records if plugin else {}
        record = records.get(asked.get("product", "")) or next(reversed(list(records.values())), None)
        figures.visible = record is not None or not whole
        key.text = legend(record)
        if whole:
            table.text = facts.products(records, record.product, asked, now) if record else ""
            head.text = facts.head(record, now)
        if record is not None:
            for pane in panes.values():
                pane.update(record, now)

    grid = [panes["blocks"].root, key] if "blocks" in panes else []
    others = [pane.root for name, pane in panes.items() if name != "blocks"]
    if whole:
        left = column(grid, stylesheets=[SIDE], **sizing)
        right = row(others, stylesheets=[SIDE, WRAP], **sizing)
        for root in others:
            root.stylesheets = [*root.stylesheets, CELL]
        figures = row(left, right, name="distmm-figures", stylesheets=[WRAP], **sizing)
    else:
        figures = column(grid or others, **sizing)
    doc.add_root(column([table, head, figures] if whole else [figures], name="distmm", **sizing))
    dashboard_server.dress(doc, "distmm" if whole else f"distmm {names[0]}", extra, bar=whole)
    update()
    doc.add_periodic_callback(update, UPDATE_MILLISECONDS if len(scheduler.workers) <= MANY else SLOW_MILLISECONDS)
    arguments = {"figures": [pane.root for pane in panes.values()], "light": theme.LIGHT, "dark": theme.DARK}
    doc.js_on_event(
        "document_ready", CustomJS(args=arguments, code=(theme.PAGES / "colours.js").read_text(encoding="utf-8"))
    )


def _pane(name: str, **sizing: Any) -> Pane:
    from distmm.telemetry.dashboard_figures import Bars, Curves
    from distmm.telemetry.dashboard_grid import Blocks

    sizing["name"] = f"distmm-{name.replace(' ', '-')}"
    if name == "blocks":
        return Blocks(**sizing)
    quantity, _, over_time = name.partition(" ")
    return Curves(quantity, **sizing) if over_time else Bars(quantity, **sizing)


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
