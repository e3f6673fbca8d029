"""The container image's recipe: pinned, in stages, without root; what it copies and installs is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from distmm.submit import manifests

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"


def steps() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (FOLDER / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_last_stage_runs_as_the_user_of_the_manifests_and_has_no_build_tools() -> None:
    words = [word for word, _ in steps()]
    assert words.count("FROM") == 2
    last = steps()[len(words) - words[::-1].index("FROM") :]
    assert ("USER", f"{manifests.USER}:{manifests.USER}") in last
    assert not [rest for word, rest in last if word == "RUN" and re.search(r"pip|apt", rest)]
    assert [rest for word, rest in last if word == "COPY"] == ["--from=build /opt/distmm /opt/distmm"]


def test_the_base_image_and_every_package_have_a_version() -> None:
    assert dict(steps())["ARG"] == "PYTHON=python:3.12.12-slim-bookworm"
    pins = (FOLDER / "constraints.txt").read_text().splitlines()[1:]
    assert pins == sorted(set(pins))
    assert all(re.fullmatch(r"[a-z0-9-]+==\d[\w.]*", pin) for pin in pins)
    pinned = {pin.split("==")[0] for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["cuda13"], *extras["tls"], "s3fs", "hatchling"]
    assert {re.match(r"[\w-]+", name)[0].lower().replace("_", "-") for name in needed} <= pinned
    assert all("--constraint" in rest for word, rest in steps() for rest in rest.split("&&") if "pip install" in rest)


def test_what_the_recipe_copies_is_there_and_not_ignored() -> None:
    kept = [line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    copies = [rest.split() for word, rest in steps() if word == "COPY" and not rest.startswith("--from")]
    for source in (source for *sources, _ in copies for source in sources):
        assert (ROOT / source).exists()
        assert source in kept
