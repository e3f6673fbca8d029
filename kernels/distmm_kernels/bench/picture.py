"""The picture of a report: a panel for each type, a line for each method, a dot for each size and order."""

from __future__ import annotations

from pathlib import Path

from distmm_kernels.bench.report import Report

ORDERS = {"C": "o", "F": "x"}  # their markers


def draw(report: Report, path: Path) -> tuple[Path, Path]:
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
