"""Pictures of what `distmm bench kernels --json` has written: rates of all methods, and the roofline of a race.

``python tests/bench/kernel_pictures.py bench.json NAME`` writes NAME.png and NAME-roofline.png, and both as .svg. They
need no display. The roofline has rates over operations per byte, and the limit by memory bandwidth; a panel for each
type of operands (Williams, Waterman, Patterson: Roofline, Communications of the ACM 52 (4), 2009).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from distmm.bench.ladder_report import Report, Row
from distmm_kernels.bench import Results, Run

__all__ = ["draw", "ladder", "roofline"]

ORDERS = {"C": "o", "F": "x"}  # their markers
PANELS = 2  # in a row of the roofline
MARKERS = "os^Dv<>"


def draw(facts: dict[str, Any], name: Path) -> None:
    """Draw the parts that were measured."""
    if found := facts.get("ladder"):
        ladder(Report(**{**found, "rows": [Row(**row) for row in found["rows"]]}), name)
    if found := facts.get("race"):
        runs = [Run(**run) for run in found["runs"]]
        roofline(Results(**{**found, "runs": runs}), name.with_name(f"{name.name}-roofline"))


def ladder(report: Report, path: Path) -> tuple[Path, Path]:
    """Write ``path`` with .png and .svg. It needs no display. The fastest method of a type is its top line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not report.rows:
        raise ValueError("the report has no rows to draw: run at least one size and dtype")
    dtypes = list(dict.fromkeys(row.dtype for row in report.rows))
    sizes = list(dict.fromkeys(row.size for row in report.rows))
    best = {
        dtype: {row.method: row.gflops for row in sorted(report.rows, key=lambda row: row.gflops) if row.dtype == dtype}
        for dtype in dtypes
    }
    longest = max(map(len, best.values()))
    figure = Figure(figsize=(4.4 * len(dtypes) + 0.6, 0.3 * longest + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(dtypes), sharex=True, squeeze=False)[0]
    for axis, dtype in zip(axes, dtypes, strict=True):
        methods = sorted(best[dtype], key=lambda method: best[dtype][method])
        for row in report.rows:
            if row.dtype == dtype:
                color = f"C{sizes.index(row.size)}"
                axis.plot(row.gflops, methods.index(row.method), ORDERS[row.order], color=color, markersize=6)
        axis.set_xscale("log")
        axis.set_yticks(range(len(methods)), methods, fontsize=9)
        axis.set_ylim(len(methods) - longest - 0.5, len(methods) - 0.5)  # lines are equally far apart in all panels
        axis.set_title(dtype, fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_xlabel("Gop/s" if dtype.startswith(("int", "uint", "bool")) else "GFLOP/s")
    handles = [Line2D([], [], linestyle="", marker="s", color=f"C{i}", label=size) for i, size in enumerate(sizes)]
    for order, marker in ORDERS.items():
        if any(row.order == order for row in report.rows):
            handles.append(Line2D([], [], linestyle="", marker=marker, color="0.3", label=f"{order} order"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)
    figure.suptitle(report.title, fontsize=10)
    written = path.with_name(path.name + ".png"), path.with_name(path.name + ".svg")
    for file in written:
        figure.savefig(file, dpi=150)
    return written


def roofline(results: Results, path: Path) -> tuple[Path, Path]:
    """Write the picture as .png and as .svg: ``path`` with these suffixes. It needs no display.

    Raises
    ------
    ValueError
        If there are no runs.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not results.runs:
        raise ValueError("the results have no runs to draw: race at least one heat at one size")
    panels: dict[str, list[Run]] = {}
    for run in results.runs:
        if run.whole:
            panels.setdefault(run.dtype, []).append(run)
    rows = -(-len(panels) // PANELS)
    figure = Figure(figsize=(6.2 * PANELS, 3.2 * rows + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, PANELS, squeeze=False).ravel()
    for axis, (dtype, runs) in zip(axes, panels.items(), strict=False):
        _panel(axis, runs, results.copy_rate)
        axis.set_title(dtype, fontsize=9)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    figure.supxlabel("operations for a byte of A, B and C", fontsize=9)
    figure.supylabel("TFLOP/s (integers: Tera-operations/s), operands' preparation included", fontsize=9)
    figure.suptitle(results.device, fontsize=10)
    written = path.with_name(path.name + ".png"), path.with_name(path.name + ".svg")
    for file in written:
        figure.savefig(file, dpi=130)
    return written


def _panel(axis: Any, runs: list[Run], copy_rate: float) -> None:
    """Draw the runs of one type: a line for each contestant and result, dashed for peers."""
    lines: dict[tuple[bool, str, str], list[Run]] = {}
    for run in runs:
        lines.setdefault((run.contestant != run.peer, run.contestant, run.out), []).append(run)
    several = len({run.out for run in runs}) > 1
    for number, ((ours, contestant, out), mine) in enumerate(sorted(lines.items())):
        mine = sorted(mine, key=lambda run: run.intensity)
        axis.plot(
            [run.intensity for run in mine],
            [run.tflops for run in mine],
            linestyle="-" if ours else "--",
            linewidth=0.8,
            marker=MARKERS[number % len(MARKERS)] if ours else "x",
            markersize=5,
            fillstyle="none",
            color=f"C{number % 10}",
            label=f"{contestant}, to {out}" if ours and several else contestant,
        )
    ends = [pick(run.intensity for run in runs) for pick in (min, max)]
    slope = [intensity * copy_rate / 1e12 for intensity in ends]
    axis.plot(ends, slope, color="black", linewidth=1, label=f"memory, {copy_rate / 1e12:.3g} TB/s")
    sizes: dict[float, dict[str, None]] = {}  # labels of each intensity; several results may have the same label
    for run in runs:
        sizes.setdefault(float(f"{run.intensity:.3g}"), {})[run.size] = None
    for intensity, names in sizes.items():
        axis.axvline(intensity, color="black", alpha=0.12, linewidth=0.7, zorder=0)
        axis.text(
            intensity, 0.01, ", ".join(names), transform=axis.get_xaxis_transform(), rotation=90, fontsize=6,
            color="0.35", va="bottom", ha="right",
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylim(top=2 * max(run.tflops for run in runs))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))


def main(arguments: list[str] | None = None) -> None:
    """Draw what a file has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file of `distmm bench kernels --json`")
    parser.add_argument("name", type=Path, help="name of the pictures, without .png and .svg")
    options = parser.parse_args(arguments)
    draw(json.loads(options.source.read_text(encoding="utf-8")), options.name)


if __name__ == "__main__":
    main()
