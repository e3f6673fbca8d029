"""The text of the dashboard's page, as HTML: the table of products, and the progress of one product."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from urllib.parse import urlencode

from distmm.telemetry import theme, units
from distmm.telemetry.facts import Fact, facts, share_done, time_left
from distmm.telemetry.figures import UNDER_WAY
from distmm.telemetry.record import Record

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
    share = share_done(record, f)
    address = escape("?" + urlencode({**asked, "product": record.product}))
    bad = f.state in ("failed", "cancelled", "stalled")
    cells = [
        f'<a href="{address}" title="{escape(record.title)}">{escape(_short(record.title))}</a>',
        escape(record.shape),
        f'<span class="{"bad" if bad else ""}">{f.state}</span>',
        f'<div class="bar"><div style="width:{share:.1%}"></div></div>',
        f"{math.floor(100 * share)} %",
        time_left(f) or "-",
        units.date(record.submitted),
        units.duration(f.seconds),
        f"{f.workers} of {f.planned}" if f.state in UNDER_WAY else str(f.planned),
    ]
    return f"<tr{' class=shown' if shown else ''}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def head(record: Record | None, now: float) -> str:
    """Return the head of the page: what a product is, its progress, and why it is slower than planned."""
    if record is None:
        return '<div class="muted">No product yet. This page fills when C = A @ B starts on this cluster.</div>'
    f = record.figures(now)
    incidents = (f"{units.clock(incident.time)} {incident}" for incident in record.incidents[-SHOWN_INCIDENTS:])
    return (
        f"<div><b>{escape(_short(record.title))}</b>: {escape(record.shape)}; plan {escape(str(record.plan))}</div>"
        f'<div class="bar"><div style="width:{share_done(record, f):.2%}"></div></div>'
        f'<div class="tiles">{"".join(map(_tile, [*facts(record, f, now), Fact("now", units.date(now))]))}</div>'
        + _line("Slower than planned: ", f.reasons[:SHOWN_REASONS])
        + _line("What happened: ", incidents)
    )


def _line(label: str, texts: Iterable[str]) -> str:
    text = "; ".join(texts)
    return f'<div><span class="muted">{label}</span>{escape(text)}</div>' if text else ""


def _tile(fact: Fact) -> str:
    return (
        f"<div><div>{escape(fact.label)}</div><span{' class=bad' if fact.bad else ''}>{escape(fact.value)}</span></div>"
    )


def _short(title: str) -> str:
    """Return the end of a long path, or the name of an array with a shortened token."""
    name, _, token = title.rpartition("-")
    if name and len(token) == 32:
        return f"{name}-{token[:6]}"
    return title if len(title) <= LONGEST_TITLE else f"...{title[3 - LONGEST_TITLE :]}"
