"""Ranks of workers: the numbers by which plans and placements name them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable


class Ranks:
    """Rank r is the worker ``addresses[r]``. A replacement inherits the rank of a dead worker, and with it its blocks.

    Attributes
    ----------
    addresses : list of str
        A dead worker keeps its entry until a replacement comes.
    names : list
        Names of these workers. A nanny restarts a worker under the same name, at another address.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.names: list[Hashable] = []
        self.alive: dict[str, int] = {}  # address -> rank

    def __len__(self) -> int:
        return len(self.addresses)

    def by_address(self, items: Iterable[tuple[object, int]]) -> dict[str, list[object]]:
        """Return the items of each worker; each item comes with a rank."""
        found: defaultdict[str, list[object]] = defaultdict(list)
        for item, rank in items:
            found[self.addresses[rank]].append(item)
        return found

    def join(self, address: str, name: Hashable) -> str | None:
        """Give a worker a rank: that of the dead worker with its name, of any dead worker, or a new one, in this order.

        Returns
        -------
        str or None
            Address of the dead worker that it replaces.
        """
        if address in self.alive:
            return None
        dead = [rank for rank, other in enumerate(self.addresses) if other not in self.alive]
        if not dead:
            self.alive[address] = len(self.addresses)
            self.addresses.append(address)
            self.names.append(name)
            return None
        rank = next((rank for rank in dead if self.names[rank] == name), dead[0])
        replaced, self.addresses[rank], self.names[rank] = self.addresses[rank], address, name
        self.alive[address] = rank
        return replaced

    def leave(self, address: str) -> None:
        """Note that a worker is dead."""
        self.alive.pop(address, None)

    def forget_dead(self) -> None:
        """Count the living workers from 0 again. If all are dead, their replacements inherit all ranks.

        Call it only while no product runs: the blocks of a product would change their homes.
        """
        if not self.alive:
            return
        ranks = [rank for rank, address in enumerate(self.addresses) if address in self.alive]
        self.addresses, self.names = [self.addresses[rank] for rank in ranks], [self.names[rank] for rank in ranks]
        self.alive = {address: rank for rank, address in enumerate(self.addresses)}
