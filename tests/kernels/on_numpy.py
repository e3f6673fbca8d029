"""What a GPU kernel asks of its device, answered by NumPy: a base class for tests of the host's part of a product."""

from __future__ import annotations

import contextlib

import numpy as np

from distmm_kernels.device import Device

NOWHERE = Device("cuda", "none", 0, 0, (9, 0), 132)


class OnNumPy:
    """Blocks are NumPy's and stay where they are; nothing is waited for."""

    _module = np

    def _to_device(self, block):
        return block

    def _on_device(self):
        return contextlib.nullcontext()

    def _complete(self):
        pass
