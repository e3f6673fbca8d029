"""What users have, beside what they would use instead: ``python tests/bench/situations.py [NAME ...]``.

Each situation runs in a process of its own, with a limit of time. In each round every contestant has one turn. The
first round is left out: it compiles kernels. Each product has a round that counts, and more until they have taken
`--seconds`. Every result is computed to where its user wants it: tasks of CuPy end when their kernels are enqueued, so
`persist` says nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import users_products as products
from users_expressions import expressions
from users_products import Products, Setting

SITUATIONS: dict[str, Callable[[Setting], Products]] = {
    each.__name__.replace("_", "-"): each
    for each in (
        products.tall, products.svd, products.chunks, products.small, products.client_arrays, products.alone,
        products.contraction, products.streams, products.neighbours, products.two_clients, products.cold, expressions,
    )
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Print a table: median seconds of each contestant, and distmm's over its peer's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all: {', '.join(SITUATIONS)}")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="gpu")
    parser.add_argument("--workers", type=int, help="by default all GPUs, or 4 CPU workers of one thread")
    parser.add_argument("--cluster", choices=["tcp", "ucx", "own"], default="tcp", help="LocalCUDACluster() as it is, "
                        "with UCX and a pool, or distmm's own")  # fmt: skip
    parser.add_argument("--turns", type=int, default=15, help="most rounds of a product that count")
    parser.add_argument("--seconds", type=float, default=2.0, help="for the rounds of a product that count")
    parser.add_argument("--scale", type=float, default=1.0, help="edges of the matrices, times this")
    parser.add_argument(
        "--patience",
        type=float,
        default=120.0,
        help="seconds until a situation is ended, with the start of its cluster",
    )
    parser.add_argument("--json", type=Path, help="write the table here, too, after each row")
    asked = parser.parse_args(arguments)
    unknown = set(asked.names) - set(SITUATIONS)
    if unknown:
        parser.error(f"no situation {', '.join(sorted(unknown))}: there are {', '.join(SITUATIONS)}")
    setting = Setting(asked.device, asked.workers, asked.cluster, asked.turns, asked.scale, asked.seconds)
    found = []
    for name in asked.names or SITUATIONS:
        begun = time.monotonic()
        for row in in_a_process(name, setting, asked.patience):
            print(text_of(row), flush=True)  # noqa: T201
            found.append(row)
            if asked.json:
                asked.json.write_text(json.dumps(found, indent=1))
        print(f"{name}: ended after {time.monotonic() - begun:.0f} s", flush=True)  # noqa: T201


def text_of(row: dict[str, Any]) -> str:
    """Return a row of the table in a line."""
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    ours = row["seconds"]["distmm"]
    others = [f"{who} {each:.4f} s ({ours / each:.2f})" for who, each in row["seconds"].items() if who != "distmm"]
    first = row["first"]["distmm"]
    return f"{row['name']}: distmm {ours:.4f} s (first {first:.2f}, {row['turns']} turns); {', '.join(others)}"


def in_a_process(name: str, setting: Setting, patience: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of a situation, each when it is there. The last one says what went wrong, if anything did."""
    context = multiprocessing.get_context("spawn")
    rows: Any = context.Queue()
    process = context.Process(target=measured, args=(name, setting, rows))
    process.start()
    deadline = time.monotonic() + patience
    while True:
        try:
            row = rows.get(timeout=max(0.1, min(1.0, deadline - time.monotonic())))
        except queue.Empty:
            if process.is_alive() and time.monotonic() < deadline:
                continue
            what = f"no end in {patience:.0f} s" if process.is_alive() else f"exit code {process.exitcode}"
            row = {"name": name, "error": what}
        if row is None:
            process.join(20)
            break
        yield row
        if "error" in row:
            break
    if process.is_alive():
        process.kill()
        process.join()


def measured(name: str, setting: Setting, rows: Any) -> None:
    """Put the rows of a situation into a queue, then None."""
    warnings.simplefilter("ignore")
    try:
        for label, contestants in SITUATIONS[name](setting):
            seconds: dict[str, list[float]] = {who: [] for who in contestants}
            spent = 0.0
            for turn in range(setting.turns + 1):
                if turn > 1 and spent > setting.seconds:
                    break
                for who, run in contestants.items():
                    started = time.perf_counter()
                    run()
                    seconds[who].append(time.perf_counter() - started)
                    spent += seconds[who][-1] if turn else 0.0
            medians = {who: statistics.median(each[1:]) for who, each in seconds.items()}
            turns, first = len(seconds["distmm"]) - 1, {who: each[0] for who, each in seconds.items()}
            rows.put({"name": f"{name}, {label}", "turns": turns, "seconds": medians, "first": first})
    except Exception as error:  # a row of the table says so
        rows.put({"name": name, "error": f"{type(error).__name__}: {str(error)[:200]}"})
    rows.put(None)


if __name__ == "__main__":
    main()
