"""The roofline: rates over operations per byte, under the slope of memory and the flat roof of the fastest product.

Williams, Waterman, Patterson: Roofline, Communications of the ACM 52 (4), 2009.
"""

from __future__ import annotations

from pathlib import Path

from distmm_kernels.bench.results import Results

__all__ = ["draw"]


def draw(results: Results, path: Path) -> tuple[Path, Path]:
    """Write ``path`` with .png and .svg; needs no display.

    Raises
    ------
    ValueError
        If there are no runs.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not results.runs:
        raise ValueError("the results have no runs to draw: race at least one heat at one size")
    figure = Figure(figsize=(9.5, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    low, high = (pick(run.intensity for run in results.runs) for pick in (min, max))
    fastest = max(run.tflops for run in results.runs)
    slope = [low * results.copy_rate / 1e12, high * results.copy_rate / 1e12]
    axis.plot([low, high], slope, color="black", linewidth=1, label=f"memory, {results.copy_rate / 1e12:.3g} TB/s")
    whole = [run for run in results.runs if run.whole]
    heats = list(dict.fromkeys(run.peer for run in whole))  # a colour each
    for contestant, dtype, out, peer in dict.fromkeys((run.contestant, run.dtype, run.out, run.peer) for run in whole):
        rivals = list(dict.fromkeys(run.contestant for run in whole if run.peer == peer))
        chosen = [run for run in whole if (run.contestant, run.out, run.peer) == (contestant, out, peer)]
        axis.plot(
            [run.intensity for run in chosen],
            [run.tflops for run in chosen],
            linestyle="none",
            marker="xos^D"[rivals.index(contestant) % 5],
            fillstyle="none",
            color=f"C{heats.index(peer) % 10}",
            label=contestant if contestant == peer else f"{contestant}, {dtype} to {out}",
        )
    sizes: dict[float, dict[str, None]] = {}  # of each intensity: those of several types may be the same
    for run in whole:
        sizes.setdefault(float(f"{run.intensity:.3g}"), {})[run.size] = None
    for intensity, names in sizes.items():
        axis.axvline(intensity, color="black", alpha=0.12, linewidth=0.7, zorder=0)
        axis.text(
            intensity, 0.01, ", ".join(names), transform=axis.get_xaxis_transform(), rotation=90, fontsize=6,
            color="0.35", va="bottom", ha="right",
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylim(top=2 * fastest)
    axis.set_xlabel("operations for a byte of A, B and C")
    axis.set_ylabel("TFLOP/s (integers: Tera-operations/s), operands' preparation included")
    axis.grid(alpha=0.3)
    axis.set_title(results.device, fontsize=10)
    figure.legend(loc="outside right upper", fontsize=7)
    written = path.with_name(path.name + ".png"), path.with_name(path.name + ".svg")
    for file in written:
        figure.savefig(file, dpi=130)
    return written
