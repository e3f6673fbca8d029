"""Rates that workers are asked for.

Plans take a rate that is lower than they assume, and no higher one: what is faster while it is idle will not be as fast
beside products.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

from distributed import Client

__all__ = ["measured_once"]

logger = logging.getLogger(__name__)

_rates: WeakKeyDictionary[Client, dict[Hashable, float | None]] = WeakKeyDictionary()
_without_client: dict[Hashable, float | None] = {}


def measured_once(client: Client | None, name: str, of: Hashable, measure: Callable[[], float]) -> float | None:
    """Return what `measure` returns, and keep it; None where it fails, also later.

    `of` names the workers, and what else the rate depends on. Rates are rounded down to two digits: plans of the same
    product are found again for the same rate.
    """
    known = _without_client if client is None else _rates.setdefault(client, {})
    if (name, of) not in known:
        known[name, of] = None  # also if this is interrupted
        try:
            rate = measure()
            step = 10.0 ** (math.floor(math.log10(rate)) - 1)
            known[name, of] = math.floor(rate / step) * step
        except Exception as error:  # whatever it is: the product has not begun, and can do without the figure
            logger.warning("%s could not be measured, plans assume the usual one: %r", name, error)
    return known[name, of]
