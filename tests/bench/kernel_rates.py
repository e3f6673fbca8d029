"""Measure every kernel on this GPU, and print the rates as a section of `rates.toml`.

``python tests/bench/kernel_rates.py > section.toml``
"""

from __future__ import annotations

import argparse

from distmm_kernels import device
from distmm_kernels.bench import of_this_gpu
from distmm_kernels.select import CANDIDATES

if __name__ == "__main__":
    known = [each.name for each in CANDIDATES if each.device_kind == "cuda"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kernel", action="append", default=[], choices=known, help="only this kernel; may be repeated"
    )
    asked = parser.parse_args()
    if missing := device.why_no_gpu():
        parser.error(f"rates are measured on a GPU, and {missing}")
    for line in of_this_gpu(device.current(), asked.kernel):
        print(line)  # noqa: T201
