"""The page ``/distmm`` of Dask's dashboard, with its entry in the navigation bar, and its plots for JupyterLab.

`distmm.telemetry.scheduler.Telemetry` adds them: with a client's first product, or from the start with
``dask scheduler --preload distmm.telemetry.preload``.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from distributed.scheduler import Scheduler

from distmm.telemetry import dashboard_server, theme, units
from distmm.telemetry.record import UNDER_WAY

if TYPE_CHECKING:
    from bokeh.document import Document

    from distmm.telemetry.record import Record

__all__ = ["install"]

# The figures of the page, each of which is a plot of its own for JupyterLab too.
PLOTS = ("blocks", "rate", "memory", "transfers")

# Milliseconds between two updates, and with more workers than `MANY`: a page of 256 workers is 60 kB an update.
UPDATE_MILLISECONDS, SLOW_MILLISECONDS, MANY = 500, 1000, 64

# Incidents that the page shows, the last ones.
SHOWN_INCIDENTS = 4


def install(scheduler: Scheduler) -> None:
    """Add the page ``/distmm``, and each of its figures as a plot of its own, to a scheduler's dashboard."""
    plots = {f"distmm {name}": functools.partial(_plot, name) for name in PLOTS}
    dashboard_server.add_pages(scheduler, "distmm", _page, plots)


def _records(scheduler: Scheduler) -> dict[str, Record]:
    """Return the records of the last products, the newest last."""
    plugin = scheduler.plugins.get("distmm-telemetry")
    return plugin.records if plugin else {}


def _page(scheduler: Scheduler, extra: dict[str, Any], doc: Document) -> None:
    """Build the page: figures of the product on top, the grid of C and the bars below."""
    from bokeh.layouts import column, row
    from bokeh.models import Div, Select

    from distmm.telemetry.dashboard_figures import QUANTITIES, Bars, Blocks

    newest = "the newest product"
    choice = Select(value=newest, options=[newest], width=320, title="", stylesheets=[FIELD])
    head = Div(sizing_mode="stretch_width", name="distmm-head")
    blocks = Blocks(sizing_mode="stretch_both", min_height=420, name="distmm-blocks")
    bars = [
        Bars(quantity, sizing_mode="stretch_width", height=220, name=f"distmm-{quantity}") for quantity in QUANTITIES
    ]
    panes = [blocks, *bars]

    def update() -> None:
        records, now = _records(scheduler), time.time()
        choice.options = [newest, *records]
        record = records.get(choice.value) or next(reversed(records.values()), None)
        head.text = _head(record, now)
        for pane in panes:
            pane.update(record, now)

    def chosen(attr: str, old: str, new: str) -> None:  # Bokeh insists on these three
        update()

    choice.on_change("value", chosen)
    right = column(*(pane.root for pane in bars), sizing_mode="stretch_width")
    doc.add_root(
        column(
            choice,
            head,
            row(blocks.root, right, sizing_mode="stretch_both"),
            sizing_mode="stretch_both",
            name="distmm",
        )
    )
    dashboard_server.dress(doc, "distmm", extra, bar=True)
    _keep_up(scheduler, doc, update, panes)


def _plot(name: str, scheduler: Scheduler, extra: dict[str, Any], doc: Document) -> None:
    """Build one figure alone, filling the pane."""
    from distmm.telemetry.dashboard_figures import Bars, Blocks

    sizing = {"sizing_mode": "stretch_both", "name": f"distmm-{name}"}
    pane = Blocks(**sizing) if name == "blocks" else Bars(name, **sizing)
    doc.add_root(pane.root)
    dashboard_server.dress(doc, f"distmm {name}", extra, bar=False)
    _keep_up(
        scheduler, doc, lambda: pane.update(next(reversed(_records(scheduler).values()), None), time.time()), [pane]
    )


def _keep_up(scheduler: Scheduler, doc: Document, update: Callable[[], None], panes: list[Any]) -> None:
    """Update the panes now and periodically, in the colour scheme of the reader's browser."""
    from bokeh.models import CustomJS

    update()
    doc.add_periodic_callback(update, UPDATE_MILLISECONDS if len(scheduler.workers) <= MANY else SLOW_MILLISECONDS)
    arguments = {"figures": [pane.root for pane in panes], "light": theme.LIGHT, "dark": theme.DARK}
    doc.js_on_event("document_ready", CustomJS(args=arguments, code=COLOUR))


FIELD = ".bk-input { background-color: var(--distmm-bar, #fff); color: var(--distmm-ink, #000); }"

# Dask's dashboard has a light theme only. Style sheets do not reach figures, which are canvases. So their colours are
# set here, by the browser's preference or by ?theme=dark in the address (JupyterLab has a theme of its own).
COLOUR = """
const asked = new URLSearchParams(location.search).get("theme");
const prefers = matchMedia("(prefers-color-scheme: dark)");
const sheet = document.head.appendChild(document.createElement("style"));
function colour() {
  const c = (asked ?? (prefers.matches ? "dark" : "light")) == "dark" ? dark : light;
  const paint = (model, colours) => model.setv(colours, {sync: false});  // the server need not know
  for (const figure of figures) {
    paint(figure.title, {text_color: c.ink});
    paint(figure, {outline_line_color: c.line});
    for (const side of [figure.above, figure.below, figure.left, figure.right, figure.center])
      for (const part of side) {
        if ("axis_label_text_color" in part.properties)
          paint(part, {axis_label_text_color: c.muted, major_label_text_color: c.muted, axis_line_color: c.line,
                       major_tick_line_color: c.line, minor_tick_line_color: null});
        else if ("grid_line_color" in part.properties)
          paint(part, {grid_line_color: c.line});
      }
    for (const renderer of figure.renderers)
      if (renderer.glyph && "text_color" in renderer.glyph.properties)
        paint(renderer.glyph, {text_color: {value: c.ink}});
  }
  const names = Object.entries(c).map(([name, value]) => `--distmm-${name}: ${value};`).join(" ");
  sheet.textContent = `
    :root { ${names} color-scheme: ${c == dark ? "dark" : "light"}; }
    html, body { background: ${c.ground}; color: ${c.ink}; }
    .navbar ul { background-color: ${c.bar}; } .navbar li a { color: ${c.ink}; }
    .dropdown-content { background-color: ${c.bar}; }`;
}
prefers.addEventListener("change", colour);
colour();
"""


def _head(record: Record | None, now: float) -> str:
    """Say what the product is and how far it is, as HTML."""
    if record is None:
        return _paragraph("No product yet. This page fills when C = A @ B starts on this cluster.")
    f = record.figures(now)
    share = f.rate / (record.plan.cluster.rate * record.plan.cluster.workers)
    left = {"waiting": "not known yet", "stalled": "stalled"}.get(f.state, "")
    if f.state == "running":
        left = units.duration(f.left) if math.isfinite(f.left) else "not known yet"
    under_way = [
        ("workers", f"{f.workers} of {f.planned}", f.workers < f.planned),
        ("last step", f"{units.duration(f.idle)} ago" if f.done else f"none for {units.duration(f.idle)}", False),
        ("last heartbeat", f"{units.duration(f.silent)} ago" if math.isfinite(f.silent) else "none", False),
    ]
    tiles = [
        ("state", f.state, f.state in ("failed", "cancelled", "stalled")),
        ("blocks of C", f"{f.blocks_done} of {f.blocks}", False),
        ("steps", f"{f.done} of {f.total}", False),
        ("rate (of the plan)", f"{units.scaled(f.rate, 'FLOP/s')} ({share:.0%})", False),
        ("time left" if left else "took", left or units.duration(f.seconds), False),
        *(under_way if f.state in UNDER_WAY else []),
        ("moved (2-D bound)", f"{units.size(f.moved)} ({units.size(f.bound)})", False),
        ("failed", str(f.failed), f.failed > 0),
        ("interrupted", str(f.interrupted), False),
        ("computed again", str(f.again), False),
        ("from disk", str(f.resumed), False),
        ("failed checks", str(f.refuted), f.refuted > 0),
    ]
    error = f'<div style="color:{theme.WRONG}">{escape(f.error)}</div>' if f.error else ""
    done = f.done / max(1, f.total)
    bar = (
        f'<div style="min-width:90vw;height:8px;background:var(--distmm-bar,{theme.LIGHT["bar"]});border-radius:4px">'
        f'<div style="height:8px;width:{done:.2%};background:{theme.DATA};border-radius:4px"></div></div>'
    )
    incidents = "".join(
        _paragraph(f"{time.strftime('%H:%M:%S', time.localtime(incident.time))} {incident}")
        for incident in record.incidents[-SHOWN_INCIDENTS:]
    )
    return (
        _paragraph(f"{record.title}: {record.plan.rows()[0][1]}; plan {record.plan}")
        + bar
        + '<div style="display:flex;flex-wrap:wrap;gap:4px 20px;margin:8px 0">'
        + "".join(_tile(*tile) for tile in tiles)
        + f"</div>{error}{incidents}"
    )


def _paragraph(text: str) -> str:
    return f'<div style="color:var(--distmm-muted,{theme.LIGHT["muted"]});font-size:13px">{escape(text)}</div>'


def _tile(label: str, value: str, alarming: bool) -> str:
    color = theme.WRONG if alarming else f"var(--distmm-ink,{theme.LIGHT['ink']})"
    return (
        f'<div><div style="font-size:12px;color:var(--distmm-muted,{theme.LIGHT["muted"]})">{escape(label)}</div>'
        f'<div style="font-size:16px;color:{color}">{escape(value)}</div></div>'
    )
