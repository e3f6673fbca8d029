"""What a process imports whose forks compile kernels: the compilers, and the device code of most kernels."""

from __future__ import annotations

import importlib

from distmm_kernels.device_code import emit

for name in (
    *("fragments", "largest", "mma", "reconstruct", "register_tiled", "residues", "thin_products"),
    *("copies.prepass", "copies.transpose", "hopper.hopper_gemm"),
):
    importlib.import_module(f"distmm_kernels.device_code.{name}")

emit.preload()
