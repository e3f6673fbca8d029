"""How often the certificate of a block finds an error: by its size and place, type, k and data.

::

    python tests/bench/certificate_rates.py            # a few minutes on two cores
    python tests/bench/certificate_rates.py --nasty 500  # right products only: false alarms

Blocks have 64 rows and 256 columns. Each rate is that of `--seeds` products, for single elements of 8 places in each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from distmm.checking import sketch
from distmm_kernels.tolerance import Tolerance
from tests.distmm.checking import nasty
from tests.distmm.checking.sketched import element, judged
from tests.kernels.reference import twins

ROWS, COLUMNS, PANEL = 64, 256, 8192
SIZES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
SETS = ("normal", "uniform", "graded rows", "graded columns")

Array = np.ndarray


def draw(name: str, data: str, k: int, seed: int) -> tuple[Array, Array]:
    """Matrices of a type; `subnormal` and `large` are normal numbers near the ends of its range."""
    rng = np.random.default_rng([seed, k])
    a, b = nasty.DATA.get(data, nasty.DATA["normal"])(rng, ROWS, k, COLUMNS)
    dtype = element(name)
    if dtype.kind == "c":
        a, b = a + 1j * a[::-1], b - 1j * b[:, ::-1]
    of = ml_dtypes.finfo(dtype)
    least, most = float(of.smallest_subnormal), float(of.max)
    if data == "subnormal":
        a = a * least * 2.0**10
    if data == "large":
        a = a * (most / 2.0**12 / np.sqrt(k))
    return a.astype(dtype), b.astype(dtype)


class Block:
    """A and B with their sketches, and the right C."""

    def __init__(self, name: str, data: str, k: int, seed: int) -> None:
        self.a, self.b = draw(name, data, k, seed)
        self.wide = np.dtype(np.float32) if self.a.dtype.itemsize == 2 else self.a.dtype
        self.c = self.product(self.a, self.b)
        self.tolerance = Tolerance.of(self.a.dtype, self.b.dtype, self.c.dtype, k)
        work = self.tolerance.work
        self.by = sketch.weigh(self.b[:PANEL], work)
        self.left: sketch.Sketch | None = None
        for p in range(0, k, PANEL):
            right = [sketch.of_b(self.b[p : p + PANEL], seed, 0, work, self.by)]
            self.left = sketch.of_a(self.left, self.a[:, p : p + PANEL], right, work, seed)
        self.x = sketch.vectors(seed, 0, COLUMNS, False)

    def product(self, a: Array, b: Array) -> Array:
        return np.asarray((a.astype(self.wide) @ b.astype(self.wide)).astype(self.a.dtype))

    def found(self, c: Array) -> bool:
        assert self.left is not None
        return not sketch.judge(self.tolerance, self.left, 0, c, self.x, by=self.by).ok

    def elements(self, seed: int) -> Iterator[tuple[int, int]]:
        rng = np.random.default_rng(seed)
        for _ in range(8):
            yield int(rng.integers(ROWS)), int(rng.integers(COLUMNS))

    def single(self, seed: int, change: Callable[[Array, tuple[int, int]], None]) -> float:
        """Return the rate at which a changed element is found, over 8 places."""
        hits = []
        for at in self.elements(seed):
            wrong = self.c.copy()
            change(wrong, at)
            hits.append(self.found(wrong))
        return float(np.mean(hits))


def rounded(x: Array, name: str) -> Array:
    if x.dtype.kind == "c":
        return np.asarray((rounded(x.real, name) + 1j * rounded(x.imag, name)).astype(x.dtype))
    if name == "TF32":
        return twins.nearest_tf32(np.ascontiguousarray(x, np.float32)).astype(x.dtype)
    return x.astype(ml_dtypes.bfloat16 if name == "bfloat16" else name).astype(x.dtype)


def whole_block(block: Block, seed: int) -> dict[str, Array]:
    """Right and wrong versions of all of C."""
    a, b, c = block.a, block.b, block.c
    step = int(np.random.default_rng(seed).integers(a.shape[1]))
    a64, b64 = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, b))
    made = {
        "dropped k": (a64 @ b64 - np.outer(a64[:, step], b64[step])).astype(c.dtype),
        "x 1.001": (c.astype(block.wide) * 1.001).astype(c.dtype),
    }
    if a.dtype.itemsize > 2:
        made |= {
            name: block.product(rounded(a, name), rounded(b, name))
            for name in ("TF32", "bfloat16", "float16")
            if name != "float16" or block.a.dtype.kind == "c" or abs(a).max() < 6e4
        }
    tile = c.copy()
    tile[16:48, 64:128] = 0
    return {**made, "zero tile": tile}


def add(size: float) -> Callable[[Array, tuple[int, int]], None]:
    """Add `size` times the root mean square of the element's column, which rows and columns of any grade have."""

    def change(c: Array, at: tuple[int, int]) -> None:
        wide = c.astype(np.complex128 if c.dtype.kind == "c" else np.float64)
        grade = np.sqrt(np.mean(abs(wide[at[0]]) ** 2)) * np.sqrt(np.mean(abs(wide[:, at[1]]) ** 2))
        c[at] = wide[at] + size * grade / np.sqrt(np.mean(abs(wide) ** 2))

    return change


def put(value: float) -> Callable[[Array, tuple[int, int]], None]:
    def change(c: Array, at: tuple[int, int]) -> None:
        c[at] = value

    return change


def flip(bit: int) -> Callable[[Array, tuple[int, int]], None]:
    """Flip a bit of a number, of the real part of a complex one."""

    def change(c: Array, at: tuple[int, int]) -> None:
        width = c.dtype.itemsize // (2 if c.dtype.kind == "c" else 1)
        words = c.view(f"u{width}")
        words[at[0], at[1] * (c.dtype.itemsize // width)] ^= words.dtype.type(1 << bit)

    return change


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(header)} |\n|{' --- |' * len(header)}")  # noqa: T201
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)  # noqa: T201


def errors_of_blocks(kinds: list[tuple[str, str, int]], seeds: int) -> None:
    rows = []
    for name, data, k in kinds:
        hits: dict[str, list[bool]] = {}
        for seed in range(seeds):
            block = Block(name, data, k, seed)
            hits.setdefault("right", []).append(block.found(block.c))
            for error, c in whole_block(block, seed).items():
                hits.setdefault(error, []).append(block.found(c))
        names = ("right", "TF32", "bfloat16", "float16", "dropped k", "x 1.001", "zero tile")
        rows.append([name, data, str(k), *(f"{np.mean(hits[n]):.0%}" if n in hits else "" for n in names)])
    table("Errors of whole blocks", ["type", "data", "k", *names], rows)


def errors_of_elements(kinds: list[tuple[str, str, int]], seeds: int) -> None:
    rows = []
    for name, data, k in kinds:
        blocks = [Block(name, data, k, seed) for seed in range(seeds)]
        changes = [*map(add, SIZES), put(np.nan), put(np.inf)]
        rates = [np.mean([block.single(seed, change) for seed, block in enumerate(blocks)]) for change in changes]
        rows.append([name, data, str(k), *(f"{rate:.0%}" for rate in rates)])
    table("One element", ["type", "data", "k", *(f"{size:.0e}" for size in SIZES), "NaN", "inf"], rows)


def errors_of_bits(kinds: list[tuple[str, str, int]], seeds: int) -> None:
    rows = []
    for name, data, k in kinds:
        blocks = [Block(name, data, k, seed) for seed in range(seeds)]
        width = 8 * blocks[0].c.dtype.itemsize // (2 if blocks[0].c.dtype.kind == "c" else 1)
        rates = [np.mean([block.single(s, flip(bit)) for s, block in enumerate(blocks)]) for bit in range(width)]
        always = next((bit for bit in range(width) if min(rates[bit:]) == 1), width)
        never = next((bit for bit in range(width) if rates[bit] > 0), width)
        mantissa = ml_dtypes.finfo(blocks[0].c.dtype).nmant
        rows.append([name, data, str(k), str(mantissa), str(always), str(never), f"{np.mean(rates):.0%}"])
    header = ["type", "data", "k", "digits", "found always from bit", "found ever from bit", "of all bits"]
    table("One bit of one element (bit 0 is the last digit)", header, rows)


def false_alarms(count: int) -> None:
    wrong, again, unsettled = [], [], 0
    with np.errstate(all="ignore"):
        for number in range(count):
            one = nasty.product(number)
            found = judged(one.a, one.b, one.c, number, alpha=one.alpha, beta=one.beta, added=one.added)
            if found.residual > 1:
                wrong.append(one.name)
            elif not found.ok and found.settled:
                again.append(one.name)
            unsettled += not found.settled
    print(  # noqa: T201
        f"\n{count} right products: {len(wrong)} called wrong, {len(again)} made again because one row stands out, "
        f"{unsettled} made again because C has inf or NaN"
    )
    for name in (*wrong, *again):
        print(f"  {name}")  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--nasty", type=int, default=0, help="only so many right products")
    given = parser.parse_args()
    if given.nasty:
        false_alarms(given.nasty)
        return
    deep = [("float32", data, k) for data in SETS[:2] for k in (4096, 16384, 65536)]
    sets = [("float32", data, 4096) for data in (*SETS[2:], "subnormal", "large")]
    types = [(name, "normal", k) for name in ("float64", "bfloat16", "float16", "complex64") for k in (4096, 16384)]
    errors_of_blocks([*deep, *sets, *types], given.seeds)
    errors_of_elements([*deep, *sets, *types], given.seeds)
    errors_of_bits([deep[0], deep[2], *types[::2]], given.seeds)


if __name__ == "__main__":
    main()
