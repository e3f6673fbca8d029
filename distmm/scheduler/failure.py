"""A fault of the scheduler's plugin ends the products under way, with its reason: they would wait for ever.

The plugin holds tasks back until it opens their step. Dask logs what a plugin raises and goes on, so nobody would.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from distributed.protocol.pickle import dumps
from distributed.scheduler import Scheduler

from distmm.graph.layer import Placed

__all__ = ["fail", "reported"]

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])


def reported(method: Method) -> Method:
    """Call ``self.give_up`` with what a method of the plugin raises, once the scheduler has ended what it is doing."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            logger.exception("distmm's plugin failed: the products under way are given up")
            self.loop.call_soon(self.give_up, error)

    return guarded  # type: ignore[return-value]


def fail(scheduler: Scheduler, error: Exception, held: str) -> None:
    """Let all tasks of products that have not begun fail, and those that are restricted to the address `held`."""
    reason = RuntimeError(
        f"distmm's plugin of the scheduler failed ({type(error).__name__}: {error}), and the products under way cannot "
        f"go on: compute them again, and report it with the scheduler's log"
    )
    failed = {}
    for ts in scheduler.tasks.values():
        waits = ts.state in ("released", "waiting", "no-worker", "queued")
        if waits and (isinstance(ts.run_spec, Placed) or held in (ts.worker_restrictions or ())):
            ts.exception, ts.exception_text, ts.exception_blame = dumps(reason), repr(reason), ts
            failed[ts.key] = "erred"
    scheduler.transitions(failed, stimulus_id="distmm-failed")
