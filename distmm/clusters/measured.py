"""Storage of rates that were measured on workers, such as the bandwidth between them.

Plans use a measured rate only if it is lower than the usual one. A link that is faster while idle will not be as fast
while products run.
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
    """Return a measured rate; measure it at the first call for these workers.

    Parameters
    ----------
    client : distributed.Client or None
        Client of the cluster; None for this process.
    name : str
        Name of the rate for the warning.
    of : hashable
        The workers, and all else on which the rate depends.
    measure : callable
        Measures the rate.

    Returns
    -------
    float or None
        The rate, rounded down to two digits, so that plans for nearly the same rate are reused. None if the measurement
        failed, now or at an earlier call.
    """
    known = _without_client if client is None else _rates.setdefault(client, {})
    if (name, of) not in known:
        known[name, of] = None  # stays after an interrupt
        try:
            rate = measure()
            step = 10.0 ** (math.floor(math.log10(rate)) - 1)
            known[name, of] = math.floor(rate / step) * step
        except Exception as error:  # any error: the product can run without this rate
            logger.warning("%s could not be measured, so plans assume the usual value: %r", name, error)
    return known[name, of]
