"""Work of each worker over time, in a bounded number of bins of equal width. Pure."""

from __future__ import annotations

from array import array

import numpy as np

# Bins of a history. When all are in use, each pair of neighbours is merged, and half of them are free again. 256
# workers take half a megabyte.
BINS = 240

# Seconds of a bin at the start. A small product takes about a second.
FIRST_WIDTH = 0.005


class History:
    """Work over time of each worker. The mean of a bin stays exact when bins are merged.

    Parameters
    ----------
    start : float
        Seconds since the epoch. Earlier work counts in the first bin.

    Attributes
    ----------
    width : float
        Seconds of a bin.
    work : dict
        By worker, the work of each bin.
    """

    def __init__(self, start: float) -> None:
        self.start, self.width = start, FIRST_WIDTH
        self.work: dict[str, array[float]] = {}

    def add(self, worker: str, start: float, stop: float, work: float) -> None:
        """Add work that a worker did at a constant rate from `start` to `stop`."""
        begin, end = max(0.0, start - self.start), max(0.0, stop - self.start)
        while end >= BINS * self.width:
            self._halve()
        bins = self.work.get(worker)
        if bins is None:
            bins = self.work[worker] = array("d", bytes(8 * BINS))
        first, last = int(begin / self.width), int(end / self.width)
        if first == last:
            bins[first] += work
            return
        speed = work / (end - begin)
        bins[first] += speed * ((first + 1) * self.width - begin)
        bins[last] += speed * (end - last * self.width)
        for at in range(first + 1, last):
            bins[at] += speed * self.width

    def rates(self, until: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the mean rate of each worker in each bin.

        Parameters
        ----------
        until : float
            End of the work so far. The last bin ends here.

        Returns
        -------
        times : array, shape (bins,)
            Middles of the bins, in seconds since `start`.
        rates : dict
            By worker, an array of shape (bins,): work per second.
        """
        seconds = max(0.0, until - self.start)
        count = min(BINS, int(np.ceil(seconds / self.width)))
        edges = np.minimum(np.arange(count + 1) * self.width, seconds)
        lengths = np.maximum(np.diff(edges), 1e-9)
        rates = {name: np.frombuffer(bins)[:count] / lengths for name, bins in self.work.items()}
        return (edges[:-1] + edges[1:]) / 2, rates

    def _halve(self) -> None:
        """Merge each pair of neighbouring bins."""
        self.width *= 2
        for name, bins in self.work.items():
            pairs = np.frombuffer(bins).reshape(-1, 2).sum(axis=1)
            self.work[name] = array("d", np.pad(pairs, (0, BINS // 2)).tobytes())
