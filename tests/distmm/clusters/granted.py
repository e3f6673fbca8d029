"""GPUs that the driver grants to this process, as a test says."""

from __future__ import annotations

from typing import Any

import pytest

from distmm_kernels import device


def grant(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], version: int = 13000) -> None:
    """Let a driver of this version of CUDA grant GPUs of these compute capabilities."""
    granted = tuple(device.Device("cuda", "GPU", i, 1 << 36, each, 100) for i, each in enumerate(capabilities))

    def answer() -> Any:
        if not granted:
            raise device._NoGpuError("no usable NVIDIA GPU here")
        return granted, version

    monkeypatch.setattr(device, "_driver_devices", answer)
