"""Lines of code of each package against its limit in `pyproject.toml`, and lines of each file: `python .ci/weight.py`.

A line of a package counts if it has code: not if it is blank, a comment, or part of a docstring. All lines of a file
count.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [ROOT / "distmm", ROOT / "kernels" / "distmm_kernels"]
MOST_LINES = 300  # of a file
WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Return how many lines of a Python file have code."""
    lines = {n for n, line in enumerate(source.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, WITH_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(_range(node.body[0]))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            start = source.splitlines()[node.lineno - 1].encode()[node.col_offset :].lstrip(b"rbfRBF")
            if start.startswith((b'"""', b"'''")):  # all lines of a long string count, also those like a comment
                lines.update(_range(node))
    return len(lines - docstrings)


def _range(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def packages() -> Counter[str]:
    """Return the lines of code of each folder directly below the sources; files beside the folders count as theirs."""
    found: Counter[str] = Counter()
    for top in SOURCES:
        for path in top.rglob("*.py"):
            inside = path.relative_to(top).parts
            found["/".join([top.name, *inside[:-1][:1]])] += code_lines(path.read_text(encoding="utf-8"))
    return found


def report(found: Counter[str], limits: dict[str, int]) -> tuple[list[str], list[str]]:
    """Return a table of all packages, and a sentence for each that its limit, or a missing one, refuses."""
    table, refused = [f"{'package':<32}{'lines':>8}{'limit':>8}"], []
    for name in sorted({*found, *limits} - {"all"}):
        table.append(f"{name:<32}{found[name]:>8,}{limits.get(name, 0):>8,}")
        if name not in limits:
            refused.append(f"{name} has no limit: give it one in [tool.distmm.weight] of pyproject.toml")
        elif name not in found:
            refused.append(f"{name} is no package any more: remove its limit from pyproject.toml")
        elif found[name] > limits[name]:
            refused.append(
                f"{name} has {found[name] - limits[name]} lines of code more than its limit of {limits[name]:,}: "
                "remove as many, or raise the limit in [tool.distmm.weight] of pyproject.toml and say why"
            )
    total = sum(found.values())
    table.append(f"{'all':<32}{total:>8,}{limits['all']:>8,}")
    if total > limits["all"]:
        refused.append(f"all packages have {total - limits['all']} lines of code more than {limits['all']:,}")
    return table, refused


def long_files(tops: list[Path] = SOURCES) -> list[str]:
    """Return a sentence for each file that has too many lines."""
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for top in tops for path in top.rglob("*.py")}
    return [
        f"{path} has {lines} lines, and a file at most {MOST_LINES}: remove some, or give its second idea another file"
        for path, lines in sorted(lengths.items())
        if lines > MOST_LINES
    ]


if __name__ == "__main__":
    weight = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["distmm"]["weight"]
    table, refused = report(packages(), weight)
    refused += long_files()
    print(*table, *refused, sep="\n")
    sys.exit(1 if refused else 0)
