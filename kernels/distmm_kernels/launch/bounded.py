"""A dictionary that keeps its newest entries, for launches and plans of the shapes that a process multiplies."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

Value = TypeVar("Value")

MOST = 1024
"""Entries of a dictionary. A process that multiplies ever new shapes keeps no more."""


class Bounded(OrderedDict[Any, Value]):
    """A dictionary of at most `MOST` entries. Any thread may read and write it."""

    def __setitem__(self, key: Any, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > MOST:
            self.popitem(last=False)  # in C, so no other thread changes it meanwhile
