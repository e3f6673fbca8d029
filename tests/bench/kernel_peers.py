"""`distmm_kernels` beside PyTorch on one GPU, in turns: ``python tests/bench/kernel_peers.py [NAME ...]``.

Arrays are PyTorch's, in C order, N(0, 1), integers from -9 to 9. In each round every contestant has one turn, in
shuffled order, of calls back to back after a pause (`distmm_kernels.bench.race.turn`). So a time is that of a whole
call, with the preparation of operands; `distmm bench kernels --part race` has errors. With ``--joules`` each contestant
also runs for so many seconds, and NVML says how much energy the GPU took.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distmm_kernels import gram, matmul, verify
from distmm_kernels.bench.race import seconds_of, turn

Call = partial[Any]
Rows = Iterator[tuple[str, Mapping[str, Call]]]

PEER = "torch"
FLOATS = "bfloat16", "float16", "float32", "float64", "complex64", "complex128"


def normal(n: int, dtype: str, zeros: float = 0.0) -> Any:
    """Return an n x n tensor on the GPU, of which this share is zero."""
    import torch

    kind = getattr(torch, dtype)
    if not (kind.is_floating_point or kind.is_complex):
        return torch.randint(-9, 10, (n, n), device="cuda").to(kind)
    drawn = torch.randn(n, n, device="cuda", dtype=kind if kind.itemsize > 2 else torch.float32).to(kind)
    return drawn * (torch.rand(n, n, device="cuda") >= zeros) if zeros else drawn


def beside_torch(A: Any, B: Any) -> dict[str, Call]:
    """Return our product and PyTorch's; of int8 to int32."""
    import torch

    if A.dtype != torch.int8:
        return {"matmul": partial(matmul, A, B), PEER: partial(torch.mm, A, B)}
    out = torch.empty(len(A), B.shape[1], dtype=torch.int32, device="cuda")
    return {"matmul": partial(matmul, A, B, out), PEER: partial(torch._int_mm, A, B)}


def products(sizes: Sequence[int], dtypes: Sequence[str], zeros: float = 0.0) -> Rows:
    """Yield each type and size."""
    for n in sizes:
        for dtype in dtypes:
            yield f"{dtype}, n = {n}", beside_torch(*(normal(n, dtype, zeros) for _ in range(2)))


def calls(sizes: Sequence[int]) -> Rows:
    """Products of the usual types, from small to large."""
    return products(sizes or (128, 512, 1024, 2048, 4096, 8192), (*FLOATS, "int8"))


def large(sizes: Sequence[int]) -> Rows:
    """float64, where the library is fast, up to sizes that fill a GPU."""
    return products(sizes or (4096, 8192, 16384, 32768), ("float64",))


def zeros(sizes: Sequence[int]) -> Rows:
    """Operands of which half is zero: kernels by halves and residues look at them, and may leave them to others."""
    return products(sizes or (2048, 8192), ("float32", "float64", "complex64", "complex128"), 0.5)


def grams(sizes: Sequence[int]) -> Rows:
    """Products with the own transpose beside the full product, ours and PyTorch's, which has none of int32."""
    for n in sizes or (4096, 8192):
        for dtype in (*FLOATS, "int8", "int32"):
            A = normal(n, dtype)
            full = beside_torch(A, A.mH.resolve_conj())
            if dtype == "int32":
                del full[PEER]
            own = partial(gram, A, full["matmul"].args[2]) if dtype == "int8" else partial(gram, A)
            yield f"{dtype}, n = {n}", {"gram": own, **full}


def checks(sizes: Sequence[int]) -> Rows:
    """Freivalds' test of a product beside the product."""
    for label, ways in products(sizes or (8192,), FLOATS):
        A, B = ways["matmul"].args
        yield label, {"verify": partial(verify, A, B, ways["matmul"]()), **ways}


def float8(sizes: Sequence[int]) -> Rows:
    """e4m3fn to bfloat16 of prepared operands, B by columns as PyTorch requires, with and without factors."""
    import cupy
    import ml_dtypes
    import numpy as np
    import torch

    from distmm_kernels import device, select
    from distmm_kernels.config import Problem
    from distmm_kernels.layout.float8 import carrier

    e4m3fn, bfloat16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
    for n in sizes or (8192, 16384):
        A, B = (normal(n, "float32").to(torch.float8_e4m3fn) for _ in range(2))
        kernel: Any = select.select(Problem(n, n, n, e4m3fn), device.current(), name="hopper_float8")
        left, right = (cupy.from_dlpack(x.view(torch.uint8)).view(carrier(e4m3fn)) for x in (A, B))
        a, b = kernel.prepare_a(left), kernel.prepare_b(right.T)
        of_rows, of_blocks = (cupy.ones((count, n), np.float32) for count in (1, -(-n // 128)))
        one, rows = torch.ones((), device="cuda"), torch.ones(n, 1, device="cuda")
        theirs = partial(torch._scaled_mm, A, B.t(), out_dtype=torch.bfloat16)
        yield (
            f"n = {n}",
            {
                "hopper_float8": partial(kernel.multiply, a, b, None, dtype=bfloat16, wait=False),
                "to float32": partial(kernel.multiply, a, b, None, dtype=np.dtype("f4"), wait=False),
                "factors of rows": partial(kernel.multiply_scaled, a, b, of_rows, of_rows, bfloat16),
                "factors of blocks": partial(kernel.multiply_scaled, a, b, of_blocks, of_blocks, bfloat16),
                f"{PEER}, fast": partial(theirs, scale_a=one, scale_b=one, use_fast_accum=True),
                f"{PEER}, slow": partial(theirs, scale_a=one, scale_b=one, use_fast_accum=False),
                f"{PEER}, rows, slow": partial(theirs, scale_a=rows, scale_b=rows.t(), use_fast_accum=False),
            },
        )


NAMES: dict[str, Callable[[Sequence[int]], Rows]] = {
    each.__name__: each for each in (calls, grams, zeros, large, checks, float8)
}


def joules_of(call: Call, once: float, seconds: float) -> float:
    """Return the energy in joules that the GPU takes for a call, by calls for so many seconds."""
    import cupy
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByPciBusId(cupy.cuda.Device().pci_bus_id)

    def taken(count: int) -> float:
        before = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        for _ in range(count):
            call()
        cupy.cuda.Device().synchronize()
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - before) / 1e3

    taken(math.ceil(0.3 / once))  # heats the GPU
    count = math.ceil(seconds / once)
    while not (joules := taken(count)):  # the counter is read some times a second only
        count *= 2
    return joules / count


def _of_number(call: Call) -> Callable[[int], Any]:
    return lambda _: call()


def measured(ways: Mapping[str, Call], rounds: int, joules: float) -> dict[str, dict[str, float]]:
    """Return each contestant's seconds under load and in the burst after a pause; and joules."""
    numbered: dict[str, Callable[[int], Any]] = {who: _of_number(call) for who, call in ways.items()}
    once = {who: seconds_of(call, 3) for who, call in numbered.items()}
    turns: dict[str, list[tuple[float, float]]] = {who: [] for who in ways}
    order = random.Random(0)
    for _ in range(rounds):
        for who in order.sample(list(ways), len(ways)):
            turns[who].append(turn(numbered[who], once[who]))
    found = {}
    for who, taken in turns.items():
        burst, sustained = (statistics.median(each[part] for each in taken) for part in (0, 1))
        found[who] = {"seconds": sustained, "burst": burst}
        if joules:
            found[who]["joules"] = joules_of(ways[who], sustained, joules)
    return found


def text_of(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return microseconds of each contestant, times the first one's, those of the burst, and joules."""
    first = next(iter(found.values()))["seconds"]
    texts = []
    for who, each in found.items():
        text = (
            f"{who} {each['seconds'] * 1e6:,.1f} µs ({each['seconds'] / first:.2f}; burst {each['burst'] * 1e6:,.1f})"
        )
        texts.append(f"{text} {each['joules']:.3g} J" if "joules" in each else text)
    return ", ".join(texts)


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each product, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all: {', '.join(NAMES)}")
    parser.add_argument("--size", type=int, action="append", default=[], help="n; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--joules", type=float, default=0.0, metavar="SECONDS", help="also measure energy, for so long")
    parser.add_argument("--json", type=Path, help="write all figures here, too")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.names) - set(NAMES):
        parser.error(f"no {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    rows = []
    for name in asked.names or NAMES:
        for label, ways in NAMES[name](asked.size):
            found = measured(ways, asked.rounds, asked.joules)
            print(f"{name}, {label}: {text_of(found)}", flush=True)  # noqa: T201
            rows.append({"name": f"{name}, {label}", "contestants": found})
            if asked.json:
                asked.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
