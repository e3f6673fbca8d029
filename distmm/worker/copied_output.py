"""An array-like object of the user, into which tasks write by copies of it, as it may be a name for a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distmm.errors import InputError
from distmm.transfer.pickling import pickled

# Most bytes of a pickled object that is sent with each task. A name of a file is smaller, and most arrays are larger.
MOST = 1 << 16


class InMemoryError(InputError):
    """A task wrote a block into its own copy of an array."""


@dataclass(frozen=True)
class CopiedOutput:
    """An array-like object of which each task has a copy.

    If a write changes what would be pickled, the block is in the memory of the copy, and not in the user's object.
    """

    array: Any

    def __setitem__(self, index: Any, block: Any) -> None:
        before = _pickled(self.array)
        self.array[index] = block
        if _pickled(self.array) != before:
            raise InMemoryError(
                f"out is a {type(self.array).__name__} that keeps its elements in memory, and tasks in other processes "
                "write to copies of it: use scheduler='threads', or a cluster"
            )


def is_light(array: Any) -> bool:
    """Whether an object can be sent with each task: it can be pickled, and its elements are hardly pickled with it."""
    outside: list[Any] = []
    inside = _pickled(array, outside)
    return inside is not None and len(inside) + sum(buffer.raw().nbytes for buffer in outside) <= MOST


def _pickled(array: Any, outside: list[Any] | None = None) -> bytes | None:
    """Return the pickle of an object; None if it cannot be pickled. Its large buffers go to the list `outside`."""
    try:
        return pickled(array, None if outside is None else outside.append)
    except Exception:  # of the user's class, which may raise anything
        return None
