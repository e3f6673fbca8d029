"""What users have, beside what they would use instead: ``python tests/bench/situations.py [NAME ...]``.

Each situation runs in a process of its own, with a limit of time. In each round every contestant has one turn. The
first round is left out: it compiles kernels. Every result is computed to where its user wants it: tasks of CuPy end
when their kernels are enqueued, so `persist` says nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from users_products import SITUATIONS, Setting


def main(arguments: list[str] | None = None) -> None:
    """Print a table: median seconds of each contestant, and distmm's over its peer's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all: {', '.join(SITUATIONS)}")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="gpu")
    parser.add_argument("--workers", type=int, help="by default all GPUs, or 4 CPU workers of one thread")
    parser.add_argument("--cluster", choices=["tcp", "ucx", "own"], default="tcp", help="LocalCUDACluster() as it is, "
                        "with UCX and a pool, or distmm's own")  # fmt: skip
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="edges of the matrices, times this")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for a situation")
    parser.add_argument("--json", type=Path, help="write the table here, too")
    asked = parser.parse_args(arguments)
    unknown = set(asked.names) - set(SITUATIONS)
    if unknown:
        parser.error(f"no situation {', '.join(sorted(unknown))}: there are {', '.join(SITUATIONS)}")
    setting = Setting(asked.device, asked.workers, asked.cluster, asked.turns, asked.scale)
    found = []
    for name in asked.names or SITUATIONS:
        for row in in_a_process(name, setting, asked.patience):
            print(text_of(row), flush=True)  # noqa: T201
            found.append(row)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


def text_of(row: dict[str, Any]) -> str:
    """Return a row of the table in a line."""
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    ours = row["seconds"]["distmm"]
    others = [f"{who} {each:.4f} s ({ours / each:.2f})" for who, each in row["seconds"].items() if who != "distmm"]
    return f"{row['name']}: distmm {ours:.4f} s; {', '.join(others)}"


def in_a_process(name: str, setting: Setting, patience: float) -> list[dict[str, Any]]:
    """Return the rows of a situation. The last one says what went wrong, if anything did."""
    context = multiprocessing.get_context("spawn")
    rows: Any = context.Queue()
    process = context.Process(target=measured, args=(name, setting, rows))
    process.start()
    deadline, found = time.monotonic() + patience, []
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
        found.append(row)
        if "error" in row:
            break
    if process.is_alive():
        process.kill()
        process.join()
    return found


def measured(name: str, setting: Setting, rows: Any) -> None:
    """Put the rows of a situation into a queue, then None."""
    warnings.simplefilter("ignore")
    try:
        for label, contestants in SITUATIONS[name](setting):
            seconds: dict[str, list[float]] = {who: [] for who in contestants}
            for _ in range(setting.turns + 1):
                for who, run in contestants.items():
                    started = time.perf_counter()
                    run()
                    seconds[who].append(time.perf_counter() - started)
            medians = {who: statistics.median(each[1:]) for who, each in seconds.items()}
            rows.put({"name": f"{name}, {label}", "seconds": medians, "first": {w: s[0] for w, s in seconds.items()}})
    except Exception as error:  # a row of the table says so
        rows.put({"name": name, "error": f"{type(error).__name__}: {str(error)[:200]}"})
    rows.put(None)


if __name__ == "__main__":
    main()
