"""Files about the project agree: imports are declared; conda recipe, hooks and workflows follow pyproject.toml."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Packages whose name in Python is not their name on PyPI.
DISTRIBUTIONS = {
    "cuda": "numba-cuda", "cupy": "cupy-cuda13x", "cupyx": "cupy-cuda13x", "distributed-ucxx": "distributed-ucxx-cu13",
    "ipython": "ipykernel", "pydantic-core": "pydantic", "rmm": "rmm-cu13", "ucxx": "distributed-ucxx-cu13",
    "yaml": "pyyaml",
}  # fmt: skip
# The other way round, on conda-forge.
ON_CONDA = {"dask": "dask-core", "prometheus-client": "prometheus_client"}


def plain(name: str) -> str:
    return name.lower().replace("_", "-")


def names(requirements: list[str]) -> set[str]:
    return {plain(re.match(r"[\w-]+", requirement)[0]) for requirement in requirements}


def imported() -> set[str]:
    """Distributions that distmm and its kernels import; benchmarks import other programs to compare with.

    PyTorch is imported only for a caller's tensors, and by examples.
    """
    found = set()
    for path in [*(ROOT / "distmm").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        if "bench" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).partition(".")[0])
    found -= sys.stdlib_module_names | {"distmm", "distmm_kernels", "torch"}
    return {plain(DISTRIBUTIONS.get(plain(name), name)) for name in found}


def test_every_package_that_is_imported_is_declared() -> None:
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    declared = names([*PROJECT["dependencies"], *extras])
    assert sorted(imported() - declared) == []


def test_the_next_major_zarr_is_not_taken_unseen() -> None:
    assert [line for line in PROJECT["dependencies"] if line.startswith("zarr")] == ["zarr>=3.1.6,<4"]


def test_conda_recipe_has_the_packages_and_version_of_the_project() -> None:
    recipe: dict[str, Any] = yaml.safe_load((ROOT / "deploy/conda/recipe.yaml").read_text())
    wanted = {f"python {PROJECT['requires-python']}"}
    for line in PROJECT["dependencies"]:
        name, bounds = re.fullmatch(r"([\w-]+)(?:\[\w+\])?(.*)", line).groups()
        wanted.add(f"{ON_CONDA.get(name, name).lower()} {bounds}".strip())
    assert set(recipe["requirements"]["run"]) == wanted
    assert recipe["context"]["version"] == PROJECT["version"]
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert tuple(entry.split(" = ")) in PROJECT["scripts"].items()


def test_citation_names_the_version_and_title_of_the_readme() -> None:
    citation = yaml.safe_load((ROOT / ".github/CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    cited = (ROOT / "README.md").read_text().partition("## Cite")[2]
    assert f"*{citation['title']}*. Version {citation['version']}" in cited


def test_hooks_lint_with_the_pinned_ruff() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = [repo["rev"] for repo in hooks if repo["repo"].endswith("ruff-pre-commit")]
    assert f"ruff=={ruff.removeprefix('v')}" in PROJECT["optional-dependencies"]["dev"]


def test_workflows_run_ci_build_the_site_and_publish_without_a_token() -> None:
    flows = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
    steps = {name: [s for job in flow["jobs"].values() for s in job["steps"]] for name, flow in flows.items()}
    assert ".ci/run" in [step.get("run") for step in steps["ci"]]
    build = "sphinx-build -W --keep-going -c deploy/site . build/site"
    assert build in [step.get("run") for step in steps["site"]]
    assert build in (ROOT / "deploy/site/README.md").read_text()
    publish = flows["release"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert [step for step in publish["steps"] if "password" in step.get("with", {})] == []
    assert all(flow["permissions"] == {"contents": "read"} for flow in flows.values())


def test_weight_counts_lines_of_code_alone_and_names_the_package_that_is_too_heavy() -> None:
    weight = runpy.run_path(str(ROOT / ".ci/weight.py"))
    text = 'x = """\n# of the string\n\n"""'
    source = f'"""Module."""\n\n# comment\ndef f(\n    x,  # why\n):\n    """Two\n    lines."""\n    return x\n{text}\n'
    assert weight["code_lines"](source) == 4 + 4
    _, refused = weight["report"](Counter(a=5, b=2), {"all": 7, "a": 4, "c": 1})
    assert [line.split(":")[0] for line in refused] == [
        "a has 1 lines of code more than its limit of 4", "b has no limit", "c is no package any more"
    ]  # fmt: skip


def test_weight_names_files_of_more_than_300_lines(tmp_path: Path) -> None:
    long_files = runpy.run_path(str(ROOT / ".ci/weight.py"))["long_files"]
    (tmp_path / "short.py").write_text("# comment\n" * 299 + "x = 1\n")
    long = tmp_path / "folder/long.py"
    long.parent.mkdir()
    long.write_text("\n" * 301)
    assert [line.split(",")[0] for line in long_files([tmp_path])] == [f"{long} has 301 lines"]
