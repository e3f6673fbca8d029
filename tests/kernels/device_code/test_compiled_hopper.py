"""Builds the Hopper kernels where there is no GPU, and reads what the compiler and the disassembler say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from distmm_kernels.tiles.hopper_tiles import HopperTile
from tests.kernels.device_code import builds

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("cuda_compiler")]

# each operand type, each way an operand may lie, C given and not, each width, all kinds of boxes, the finish, panels,
# triangles
TILES = [
    HopperTile("bfloat16", "bfloat16"),
    HopperTile("bfloat16", "float32", a_major="m", b_major="k", adds=True),
    HopperTile("float16", "float16", 192, adds=True),
    HopperTile("float16", "float32", 64, b_major="k"),
    HopperTile("tfloat32", "float32", b_major="k", adds=True),
    HopperTile("bfloat16", "bfloat16", 192, promotes=True),
    HopperTile("float16", "float32", 192, a_major="m", b_major="k", promotes=True, adds=True),
    HopperTile("tfloat32", "float32", 192, b_major="k", promotes=True, adds=True),
    HopperTile("int8", "int32", b_major="k", adds=True),
    HopperTile("uint8", "int32", b_major="k"),
    HopperTile("uint8", "int32", 192, b_major="k", adds=True),
    HopperTile("int8", "int8", b_major="k"),
    HopperTile("int8", "int8", 128, b_major="k"),
    HopperTile("uint8", "bool", b_major="k"),
    HopperTile("int8", "uint8", b_major="k", adds=True),
    HopperTile("float16", "float32", 192, products=3, scaled=True, adds=True),
    HopperTile("float16", "float32", 128, a_major="m", products=3, scaled=True),
    HopperTile("tfloat32", "float32", 192, b_major="k", products=3, adds=True),
    HopperTile("bfloat16", "bfloat16", finishes=True, c0="bfloat16"),
    HopperTile("bfloat16", "bfloat16", 192, promotes=True, adds=True, finishes=True, c0="float32"),
    HopperTile("bfloat16", "float32", finishes=True),
    HopperTile("float16", "float32", 192, products=3, scaled=True, adds=True, finishes=True, c0="float32"),
    HopperTile(
        "float16", "float16", 192, a_major="m", promotes=True, adds=True, panels=True, finishes=True, c0="float16"
    ),
    HopperTile("bfloat16", "float32", 192, promotes=True, adds=True, panels=True),
    HopperTile("int8", "int32", b_major="k", panels=True, adds=True),
    HopperTile("uint8", "bool", b_major="k", panels=True),
    HopperTile("bfloat16", "float32", sliced=True),
    HopperTile("float16", "float32", 128, a_major="m", b_major="k", sliced=True),
    HopperTile("int8", "int32", b_major="k", sliced=True),
    HopperTile("bfloat16", "bfloat16", b_major="k", symmetric=True),
    HopperTile("bfloat16", "float32", 128, a_major="m", symmetric=True, sliced=True),
    HopperTile("float16", "float32", 192, b_major="k", products=3, scaled=True, adds=True, symmetric=True),
    HopperTile("float16", "float32", 192, products=3, scaled=True, adds=True, symmetric=2),
    HopperTile("int8", "int32", b_major="k", adds=True, symmetric=True),
    HopperTile("int8", "int8", b_major="k", symmetric=True),
    HopperTile(
        "float16",
        "float16",
        192,
        "m",
        promotes=True,
        adds=True,
        panels=True,
        finishes=True,
        c0="float16",
        symmetric=True,
    ),
    HopperTile("float8_e4m3fn", "float32", 192, b_major="k", promotes=True, adds=True, panels=True),
    HopperTile("float8_e4m3fn", "bfloat16", 192, b_major="k", promotes=True, b_operand="float8_e5m2"),
    HopperTile("float8_e5m2", "bfloat16", 192, b_major="k", promotes=True, scaled=True),
    HopperTile("float8_e4m3fn", "float32", 192, b_major="k", promotes=True, adds=True, symmetric=True),
    HopperTile("float8_e5m2", "float32", 128, b_major="k", promotes=True, scaled_blocks=True),
]

INSTRUCTIONS = {
    "bfloat16": r"HGMMA.*F32\.BF16",
    "float16": r"HGMMA.*F32\b(?!\.)",
    "tfloat32": r"HGMMA.*F32\.TF32",
    "int8": r"IGMMA.*S8",
    "uint8": r"IGMMA.*U8",
    "float8_e4m3fn": r"QGMMA.*F32\.E4M3\.",
    "float8_e5m2": r"QGMMA.*F32\.E5M2\.E5M2",
}


def disassembled(cubin: bytes, folder: Path) -> str | None:
    """What nvdisasm makes of it; None where there is no nvdisasm."""
    wheel = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvdisasm")
    program = shutil.which("nvdisasm") or (str(wheel) if wheel.exists() else None)
    if program is None:
        return None
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([program, "-c", path], capture_output=True, check=True, text=True).stdout


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_build_without_spills_and_keep_the_tensor_cores_busy(tile, tmp_path):
    made = builds.hopper(tile)
    # C7504: registers not moved between warpgroups; C7508 to C7515: wgmma serialised
    assert not re.search(r"C75\d\d", made.log)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in made.log
    assert re.search(r"Used 168 registers", made.log)
    assert made.shared_bytes == tile.shared_bytes
    assert made.threads == 384
    code = disassembled(made.cubin, tmp_path)
    if code is None:
        return
    assert not re.search(r"\b(LDL|STL)\b", code)
    found = re.findall(INSTRUCTIONS[tile.operand], code)
    assert len(found) >= tile.products * tile.depth // tile.instruction_depth
    assert re.search(rf"GMMA\.64x{tile.columns}x{tile.instruction_depth}", code)
    for needed in ("UTMALDG.3D", "UTMASTG.3D", "SYNCS", "USETMAXREG"):
        assert needed in code
    assert ("STSM" in code) == (tile.output in ("float16", "bfloat16"))
    reads = tile.scaled or tile.scaled_blocks or tile.output == "int8"
    read = {line for line in re.findall(r"\bLDG\b\S*", code) if "STRONG" not in line}  # strong: the counter of the pace
    assert bool(read) == reads, "factors, or a modulus; C comes by the TMA"


def test_inlining_without_copies_of_scopes_makes_the_same_machine_code():
    """In processes of their own, since Numba numbers the functions of a process."""
    program = """
import contextlib, hashlib, sys
from distmm_kernels.device_code import emit
from distmm_kernels.tiles.hopper_tiles import HopperTile
from tests.kernels.device_code import builds
if sys.argv[1] == "copied":
    emit.shared_scopes = contextlib.nullcontext
tile = HopperTile("bfloat16", "float32", 64, promotes=True, adds=True)
print(hashlib.sha256(builds.hopper(tile).cubin).hexdigest())
"""

    def built(how):
        command, root = [sys.executable, "-c", program, how], Path(__file__).parents[3]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout

    assert built("shared") == built("copied")
