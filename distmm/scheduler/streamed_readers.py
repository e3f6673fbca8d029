"""How many blocks of a streamed C the tasks that read it need at a time. Pure.

A task that reads blocks of several waves, such as those of ``C + C.T``, keeps the first of them until the last one is
made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from itertools import accumulate
from typing import NamedTuple

from distmm.graph.placement import Key

Neighbours = Callable[[Key], Iterable[Key]]


class MadeBlock(NamedTuple):
    """The result of one chain, for which the chain needs a slot.

    Attributes
    ----------
    keys : collection of keys
        A block of C, and its mirror image in a symmetric product.
    wave : int
        Number of the wave in which it is made.
    ranks : collection of int
        Workers that need a slot for it: one on each layer of the grid.
    stays : bool
        Whether it stays in memory until the end, or may stay: a client keeps it, or another product reads it.
    """

    keys: Collection[Key]
    wave: int
    ranks: Collection[int]
    stays: bool = False


def most_at_a_time(made: Collection[MadeBlock], readers: Neighbours, reads: Neighbours) -> int:
    """Return the slots that each worker needs so that a streamed product can end.

    Parameters
    ----------
    made : collection of MadeBlock
    readers : callable
        Tasks that are to run and read the result of a task.
    reads : callable
        Tasks whose results a task reads.
    """
    last = max((each.wave for each in made), default=0)
    ready = _ready({key: each.wave for each in made for key in each.keys}, readers, reads)
    changes: defaultdict[int, Counter[int]] = defaultdict(Counter)  # rank -> wave -> blocks more than before
    for each in made:
        done = [ready[reader] for key in each.keys for reader in readers(key)]
        until = last if each.stays else max(each.wave, *done, 0)
        for rank in each.ranks:
            changes[rank][each.wave] += 1
            changes[rank][until + 1] -= 1
    return max((max(accumulate(count for _, count in sorted(each.items()))) for each in changes.values()), default=0)


def reached(keys: Iterable[Key], readers: Neighbours) -> set[Key]:
    """Return these tasks, and all that need their results, directly or not."""
    found = set(keys)
    stack = list(found)
    while stack:
        for reader in readers(stack.pop()):
            if reader not in found:
                found.add(reader)
                stack.append(reader)
    return found


def _ready(made: dict[Key, int], readers: Neighbours, reads: Neighbours) -> dict[Key, int]:
    """Return the wave after which each task that needs blocks of C, directly or not, can be done."""
    ready = dict(made)
    # Task -> tasks that it reads, and that need blocks of C themselves.
    waits = Counter(reader for key in reached(made, readers) for reader in readers(key))
    done = list(made)
    while done:
        for reader in readers(done.pop()):
            if reader in made:
                continue
            waits[reader] -= 1
            if not waits[reader]:
                ready[reader] = max(ready[key] for key in reads(reader) if key in ready)
                done.append(reader)
    return ready
