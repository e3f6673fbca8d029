"""The picture of a report: bars of GFLOP/s, a panel for each type and order, a group for each size."""

from __future__ import annotations

from pathlib import Path

from distmm_kernels.bench.report import Report

__all__ = ["draw"]


def draw(report: Report, path: Path) -> tuple[Path, Path]:
    """Write ``path`` with .png and .svg; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not report.rows:
        raise ValueError("the report has no rows to draw: run at least one size and dtype")
    panels = list(dict.fromkeys((row.dtype, row.order) for row in report.rows))
    methods = list(dict.fromkeys(row.method for row in report.rows))
    orders = len({order for _, order in panels})
    figure = Figure(figsize=(4.6 * max(1, len(panels) // orders) + 1.2, 3.4 * orders + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(orders, -(-len(panels) // orders), sharey=True, squeeze=False)
    flat = axes.T.ravel()  # panels come dtype by dtype: one column each, its orders below one another
    for axis, (dtype, order) in zip(flat, panels, strict=False):
        rows = [row for row in report.rows if (row.dtype, row.order) == (dtype, order)]
        sizes = list(dict.fromkeys(row.size for row in rows))
        for number, method in enumerate(methods):
            bars = [(sizes.index(row.size), row.gflops) for row in rows if row.method == method]
            width = 0.85 / len(methods)
            axis.bar(
                [group + (number - (len(methods) - 1) / 2) * width for group, _ in bars],
                [rate for _, rate in bars],
                width,
                color=f"C{number}",
                label=method,
            )
        axis.set_yscale("log")
        axis.set_xticks(range(len(sizes)), [size.replace("x", "x\n") for size in sizes], fontsize=8)
        axis.set_title(f"{dtype}, {order} order", fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel(
            "GFLOP/s" + (" (integer: Gop/s)" if any(row.dtype.startswith("int") for row in report.rows) else "")
        )
    handles, labels = max((axis.get_legend_handles_labels() for axis in flat), key=lambda found: len(found[0]))
    figure.legend(handles, labels, loc="outside lower center", ncols=len(methods), fontsize=9)
    figure.suptitle(report.title, fontsize=10)
    written = path.with_name(path.name + ".png"), path.with_name(path.name + ".svg")
    for file in written:
        figure.savefig(file, dpi=150)
    return written
