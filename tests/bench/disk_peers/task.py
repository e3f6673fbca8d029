"""What a peer is to multiply: read and written as a line of JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Literal

__all__ = ["Task"]


@dataclass(frozen=True)
class Task:
    """One product of Zarr arrays.

    Attributes
    ----------
    program : str
        The module of this folder that multiplies.
    device : {"cpu", "gpu"}
    workers : int
        GPUs, or processes that share the cores.
    limit : int or None
        Bytes of host memory of each; None: their part of the machine's.
    block : int
        Edge of the blocks that a task reads at once, a multiple of that of the chunks.
    a, b, c : str
        Folders of the arrays; C is made.
    scratch : str
        Folder for whatever else the program writes.
    """

    program: str
    device: Literal["cpu", "gpu"]
    workers: int
    limit: int | None
    block: int
    a: str
    b: str
    c: str
    scratch: str

    @property
    def threads(self) -> int:
        """Of each worker, so that all cores have work."""
        return max(1, (os.cpu_count() or 1) // self.workers)

    @classmethod
    def read(cls, line: str) -> Task:
        """Read what `write` wrote."""
        return cls(**json.loads(line))

    def write(self) -> str:
        """Return one line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"
