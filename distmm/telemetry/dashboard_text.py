"""The text of the dashboard's page, as HTML: the table of products, and the progress of one product."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from html import escape
from urllib.parse import urlencode

from distmm.telemetry import slowness, theme, units
from distmm.telemetry.record import UNDER_WAY, Figures, Record

__all__ = ["STYLE", "head", "products"]

# The page shows so many of the last incidents, and so many of the first reasons.
SHOWN_INCIDENTS, SHOWN_REASONS = 4, 3

# The table shows at most so many letters of a path, the last ones.
LONGEST_TITLE = 48

# Style sheet of the text elements; `distmm.telemetry.dashboard` sets the colours that it uses.
STYLE = f"""
:host {{ {" ".join(f"--{name}: var(--distmm-{name}, {color});" for name, color in theme.LIGHT.items())}
         color: var(--ink); font-size: 13px; }}
:host > .bk-clearfix {{ width: 100%; }}
a {{ color: inherit; }}
table {{ border-collapse: collapse; width: 100%; }}
th {{ text-align: left; font-weight: normal; font-size: 12px; color: var(--muted); padding: 0 12px 2px 4px; }}
td {{ padding: 2px 12px 2px 4px; border-top: 1px solid var(--line); white-space: nowrap; }}
td:nth-child(-n+2) {{ white-space: normal; overflow-wrap: anywhere; }}
tr.shown td {{ background: var(--bar); font-weight: bold; }}
.bad {{ color: {theme.WRONG}; }}
.muted {{ color: var(--muted); }}
.tiles {{ display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 6px 0; }}
.tiles div div {{ font-size: 12px; color: var(--muted); }}
.tiles span {{ font-size: 16px; }}
.bar {{ background: var(--bar); outline: 1px solid var(--line); height: 8px; min-width: 60px; border-radius: 4px; }}
.bar div {{ background: {theme.DATA}; height: 8px; border-radius: 4px; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; }}
"""


def products(records: Mapping[str, Record], shown: str, asked: Mapping[str, str], now: float) -> str:
    """Return the table of products, the newest first.

    Parameters
    ----------
    records : mapping
        Records by name of the product, the newest last.
    shown : str
        Name of the product that the page shows.
    asked : mapping
        Arguments of the page's address; the links to products keep them.
    now : float
        Seconds since the epoch.
    """
    rows = (_row(record, record.product == shown, asked, now) for record in reversed(list(records.values())))
    labels = ("product", "what is multiplied", "state", "done", "", "time left", "started", "for", "workers")
    heads = "".join(f"<th>{label}</th>" for label in labels)
    return f"<table><tr>{heads}</tr>{''.join(rows)}</table>"


def _row(record: Record, shown: bool, asked: Mapping[str, str], now: float) -> str:
    f = record.figures(now)
    share = _share(record, f)
    address = escape("?" + urlencode({**asked, "product": record.product}))
    cells = [
        f'<a href="{address}" title="{escape(record.title)}">{escape(_short(record.title))}</a>',
        escape(record.shape),
        f'<span class="{_class(f)}">{f.state}</span>',
        f'<div class="bar"><div style="width:{share:.1%}"></div></div>',
        f"{math.floor(100 * share)} %",
        _left(f) or "-",
        _clock(record.started or record.submitted, now),
        units.duration(_took(record, now)),
        f"{f.workers} of {f.planned}" if f.state in UNDER_WAY else str(f.planned),
    ]
    return f"<tr{' class=shown' if shown else ''}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def head(record: Record | None, now: float) -> str:
    """Return the head of the page: what a product is, its progress, and why it is slower than planned."""
    if record is None:
        return '<div class="muted">No product yet. This page fills when C = A @ B starts on this cluster.</div>'
    f = record.figures(now)
    ideal = f.rate / (record.plan.cluster.rate * record.plan.cluster.workers)
    under_way = [
        ("time left", _left(f), False),
        ("workers", f"{f.workers} of {f.planned}", f.workers < f.planned),
        ("last step", f"{units.duration(f.idle)} ago" if f.done else f"none for {units.duration(f.idle)}", False),
        ("last heartbeat", f"{units.duration(f.silent)} ago" if math.isfinite(f.silent) else "none", False),
    ]
    happened = {
        "interrupted": f.interrupted,
        "computed again": f.again,
        "from disk": f.resumed,
        "failed checks": f.refuted,
    }
    tiles = [
        ("state", f.state, bool(_class(f))),
        ("blocks of C", f"{f.blocks_done} of {f.blocks}", False),
        ("steps", f"{f.done} of {f.total}", False),
        ("started", _clock(record.started or record.submitted, now), False),
        ("for" if f.state in UNDER_WAY else "took", units.duration(_took(record, now)), False),
        ("now", time.strftime("%H:%M:%S %Z", time.localtime(now)), False),
        ("rate (of the plan)", f"{units.scaled(f.rate, 'FLOP/s')} ({ideal:.0%})", False),
        *(under_way if f.state in UNDER_WAY else []),
        ("moved (2-D bound)", f"{units.size(f.moved)} ({units.size(f.bound)})", False),
        ("failed", str(f.failed), f.failed > 0),
        *((label, str(count), label == "failed checks") for label, count in happened.items() if count),
    ]
    incidents = (
        f"{time.strftime('%H:%M:%S', time.localtime(incident.time))} {incident}"
        for incident in record.incidents[-SHOWN_INCIDENTS:]
    )
    return (
        f"<div><b>{escape(_short(record.title))}</b>: {escape(record.plan.rows()[0][1])}; plan "
        f"{escape(str(record.plan))}</div>"
        f'<div class="bar"><div style="width:{_share(record, f):.2%}"></div></div>'
        f'<div class="tiles">{"".join(_tile(*tile) for tile in tiles)}</div>'
        + (f'<div class="bad">{escape(f.error)}</div>' if f.error else "")
        + _line("Slower than planned: ", slowness.reasons(record, now)[:SHOWN_REASONS])
        + _line("What happened: ", incidents)
    )


def _line(label: str, texts: Iterable[str]) -> str:
    text = "; ".join(texts)
    return f'<div><span class="muted">{label}</span>{escape(text)}</div>' if text else ""


def _tile(label: str, value: str, alarming: bool) -> str:
    return f"<div><div>{escape(label)}</div><span{' class=bad' if alarming else ''}>{escape(value)}</span></div>"


def _class(f: Figures) -> str:
    return "bad" if f.state in ("failed", "cancelled", "stalled") else ""


def _share(record: Record, f: Figures) -> float:
    """Return the fraction of a product's steps that is done; the steps of blocks from disk count as done."""
    kept = float((record.resumed * record.steps_of).sum())
    return float((f.done + kept) / max(1, f.total + kept))


def _took(record: Record, now: float) -> float:
    return max(0.0, record.end(now) - (record.started or record.submitted))


def _left(f: Figures) -> str:
    """Return the time left as text; empty for a product that has ended."""
    if f.state == "running":
        return units.duration(f.left) if math.isfinite(f.left) else "not known yet"
    return {"waiting": "not known yet", "stalled": "stalled"}.get(f.state, "")


def _clock(at: float, now: float) -> str:
    """Return a time of day, with the date if it is not today's."""
    day, today = (time.strftime("%Y-%m-%d", time.localtime(each)) for each in (at, now))
    return ("" if day == today else f"{day} ") + time.strftime("%H:%M:%S", time.localtime(at))


def _short(title: str) -> str:
    """Return the end of a long path, or the name of an array with a shortened token."""
    name, _, token = title.rpartition("-")
    if name and len(token) == 32:
        return f"{name}-{token[:6]}"
    return title if len(title) <= LONGEST_TITLE else f"...{title[3 - LONGEST_TITLE :]}"
