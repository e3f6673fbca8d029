"""What is said of a product on the page and in the report: labels and values for both, and the text of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from distmm import templates, units
from distmm.telemetry import theme
from distmm.telemetry.figures import ALARMING, UNDER_WAY, Figures
from distmm.telemetry.record import Record


class Fact(NamedTuple):
    """A label, its value as text, and whether it alarms."""

    label: str
    value: str
    bad: bool = False


def facts(record: Record, f: Figures) -> list[Fact]:
    """Return what there is to say of a product, in the order of importance; `f`: its figures at that time."""
    lanes, cluster, planned = record.lanes.values(), record.plan.cluster, record.plan.peak.worker
    under_way, over = f.state in UNDER_WAY, record.over
    peak, others = (max((getattr(lane, of) for lane in lanes), default=0) for of in ("peak_blocks", "others"))
    busy = sum(lane.seconds["multiply"] for lane in lanes) / max(1e-9, f.seconds * len(lanes))
    beside = f", beside {units.size(others)} of other blocks" if others else ""
    found = [
        Fact("state", f.state, f.state in ALARMING),
        Fact("blocks of C", f"{f.blocks_done} of {f.blocks}"),
        Fact("steps", f"{f.done} of {f.total}"),
        Fact("started", units.date(record.submitted)),
        Fact("ended" if over else "last step", units.date(record.advanced) if over or f.done else "none yet"),
        Fact("took" if over else "for", units.duration(f.seconds)),
    ]
    if under_way:
        found += [
            Fact("time left", time_left(f)),
            Fact("without a step", units.duration(f.idle), f.state == "stalled"),
            Fact("workers", f"{f.workers} of {f.planned}", f.workers < f.planned),
            Fact("last heartbeat", f"{units.duration(f.silent)} ago" if math.isfinite(f.silent) else "none"),
        ]
    happened = {"interrupted": f.interrupted, "computed again": f.again, "from disk": f.resumed}
    return [
        *found,
        Fact("rate (of the plan)", f"{units.scaled(f.rate, 'FLOP/s')} ({f.rate / cluster.rate / cluster.workers:.0%})"),
        Fact("workers busy", f"{busy:.0%}"),
        Fact("moved (2-D bound)", f"{units.size(f.moved)} ({units.size(f.bound)})"),
        Fact("most memory on a worker (planned)", f"{units.size(peak)} ({units.size(planned)}){beside}"),
        Fact("checked", checked(record), f.refuted > 0),
        Fact("failed", str(f.failed), f.failed > 0),
        *(Fact(label, str(count)) for label, count in happened.items() if count),
        *([Fact("error", f.error, True)] if f.error else []),
    ]


def checked(record: Record) -> str:
    """Return how many blocks passed their check, as text."""
    passed = int(record.certified.sum())
    if not passed and not record.refutations:
        return "not checked"
    wrong = f", {int(record.refuted.sum())} of them not corrected yet" if record.refuted.any() else ""
    return f"{passed} blocks passed, {record.refutations} failed{wrong}"


def time_left(f: Figures) -> str:
    """Return the time left as text; empty for a product that has ended."""
    if f.state == "running":
        return units.duration(f.left) if math.isfinite(f.left) else "not known yet"
    return {"waiting": "not known yet", "stalled": "stalled"}.get(f.state, "")


def share_done(record: Record, f: Figures) -> float:
    """Return the fraction of a product's steps that is done; the steps of blocks from disk count as done."""
    kept = float((record.resumed * record.steps_of).sum())
    return float((f.done + kept) / max(1, f.total + kept))


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
    return templates.filled(
        theme.PAGES / "products.html", records=records, shown=shown, asked=asked, now=now,
        units=units, share=share_done, left=time_left, alarming=ALARMING, under_way=UNDER_WAY,
    )  # fmt: skip


def head(record: Record | None, now: float) -> str:
    """Return the head of the page: what a product is, its progress, and why it is slower than planned."""
    if record is None:
        return templates.filled(theme.PAGES / "head.html", record=None)
    f = record.figures(now)
    return templates.filled(
        theme.PAGES / "head.html", record=record, share=share_done(record, f), units=units,
        facts=[*facts(record, f), Fact("now", units.date(now))], reasons=f.reasons[:SHOWN_REASONS],
        incidents=record.incidents[-SHOWN_INCIDENTS:],
    )  # fmt: skip
