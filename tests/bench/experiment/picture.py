"""The picture of a run: TFLOP/s over the number of workers, a panel for each scaling, place and type."""

from __future__ import annotations

from pathlib import Path

from distmm.errors import InputError
from experiment.cases import KERNEL
from experiment.results import Results

__all__ = ["draw"]


def draw(results: Results, path: Path) -> tuple[Path, Path]:
    """Write the picture as .png and as .svg: ``path`` with these suffixes. It needs no display.

    Raises
    ------
    InputError
        If no product was measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in results.rows if row.rate and row.case.program != KERNEL]
    if not rows:
        raise InputError("nothing was measured that could be drawn: the table says why")
    programs = list(dict.fromkeys(row.case.program for row in rows))
    scalings = [name for name in ("strong", "weak") if any(row.case.scaling == name for row in rows)]
    kinds = list(dict.fromkeys((row.case.place, row.case.dtype) for row in rows))
    counts = sorted({row.case.workers for row in rows})
    figure = Figure(figsize=(3.4 * len(kinds) + 1.2, 3.2 * len(scalings) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(scalings), len(kinds), sharex=True, sharey="row", squeeze=False)
    for axis, scaling, (place, dtype) in (
        (axes[i][j], scaling, kind) for i, scaling in enumerate(scalings) for j, kind in enumerate(kinds)
    ):
        here = [row for row in rows if (row.case.scaling, row.case.place, row.case.dtype) == (scaling, place, dtype)]
        for number, program in enumerate(programs):
            line = sorted((row.case.workers, (row.rate or 0) / 1e12) for row in here if row.case.program == program)
            if line:
                axis.plot(*zip(*line, strict=True), "o-", color=f"C{number}", label=program)
        for alone in results.rows:
            if alone.case.program == KERNEL and alone.case.dtype == dtype and alone.rate:
                ceiling = [workers * alone.rate / 1e12 for workers in counts]
                axis.plot(counts, ceiling, "--", color="0.5", label="kernel alone, times the workers")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.set_title(f"{scaling}, {place}, {dtype}", fontsize=10)
        axis.grid(which="both", alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("GPUs" if results.experiment.device == "gpu" else "workers")
    named = {
        label: handle for axis in axes.ravel() for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named), fontsize=9)
    figure.suptitle(results.title, fontsize=10)
    written = path.with_name(path.name + ".png"), path.with_name(path.name + ".svg")
    for file in written:
        figure.savefig(file, dpi=150)
    return written
