"""The text of the dashboard's page, as HTML: the table of products, and the progress of one product."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

from distmm import templates, units
from distmm.telemetry import theme
from distmm.telemetry.facts import Fact, facts, share_done, time_left
from distmm.telemetry.figures import ALARMING, UNDER_WAY
from distmm.telemetry.record import Record

# The page shows so many of the last incidents, and so many of the first reasons.
SHOWN_INCIDENTS, SHOWN_REASONS = 4, 3


def style() -> str:
    """Return the style sheet of the text elements. `distmm.telemetry.dashboard` sets the colours that it uses."""
    return templates.filled(theme.PAGES / "page.css", light=theme.LIGHT, data=theme.DATA, wrong=theme.WRONG)


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
    rows = []
    for record in reversed(list(records.values())):
        f = record.figures(now)
        rows.append(
            {
                "record": record,
                "f": f,
                "name": units.shortened(record.title),
                "shown": record.product == shown,
                "address": "?" + urlencode({**asked, "product": record.product}),
                "bad": f.state in ALARMING,
                "share": share_done(record, f),
                "left": time_left(f),
                "started": units.date(record.submitted),
                "seconds": units.duration(f.seconds),
                "workers": f"{f.workers} of {f.planned}" if f.state in UNDER_WAY else f.planned,
            }
        )
    return templates.filled(theme.PAGES / "products.html", rows=rows)


def head(record: Record | None, now: float) -> str:
    """Return the head of the page: what a product is, its progress, and why it is slower than planned."""
    if record is None:
        return templates.filled(theme.PAGES / "head.html", record=None)
    f = record.figures(now)
    return templates.filled(
        theme.PAGES / "head.html",
        record=record,
        name=units.shortened(record.title),
        share=share_done(record, f),
        facts=[*facts(record, f), Fact("now", units.date(now))],
        reasons=f.reasons[:SHOWN_REASONS],
        incidents=[f"{units.clock(incident.time)} {incident}" for incident in record.incidents[-SHOWN_INCIDENTS:]],
    )
