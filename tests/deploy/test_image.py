"""The container image's recipe: pinned, in stages, without root; what it copies and installs is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from distmm.submit import manifests

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"


def steps() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (FOLDER / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in steps():
        if word == "FROM":
            found.append([])
        elif found:
            found[-1].append((word, rest))
    return found


def test_the_base_image_has_a_version() -> None:
    assert steps()[0] == ("ARG", "PYTHON=python:3.12.12-slim-bookworm")


def test_the_last_stage_runs_as_the_user_of_the_manifests_and_has_no_build_tools() -> None:
    last = stages()[-1]
    assert ("USER", f"{manifests.USER}:{manifests.USER}") in last
    (made,) = [rest for word, rest in last if word == "RUN"]
    assert f"distmm:x:{manifests.USER}:{manifests.USER}::/tmp:" in made
    assert not re.search(r"pip|apt", made)


def test_packages_are_in_a_layer_below_the_source_and_come_by_hash() -> None:
    dependencies, source, last = stages()
    assert [rest.split()[0] for word, rest in dependencies if word == "COPY"] == ["deploy/docker/requirements.txt"]
    copied = [rest for word, rest in last if word == "COPY"]
    assert copied == ["--from=dependencies /opt/distmm /opt/distmm", "--from=source /opt/source /opt/distmm"]
    runs = [line for word, rest in dependencies + source if word == "RUN" for line in rest.split("&&")]
    installs = [line for line in runs if re.search(r"pip .*install|pip wheel", line)]
    assert len(installs) == 4
    assert all("--require-hashes" in line or "--no-index --no-deps" in line for line in installs)
    # Bytecode of pip's would have the time of its source, and would not be made anew.
    assert all("--no-compile" in line for line in installs if "--python" in line)


def test_every_package_has_a_version_and_the_hash_of_a_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    needed = {
        "requirements.txt": [*project["project"]["dependencies"], *extras["cuda13"], *extras["tls"], "s3fs"],
        "build.txt": project["build-system"]["requires"],
    }
    for name, wanted in needed.items():
        _, *lines = re.sub(r"\\\n", " ", (FOLDER / name).read_text()).splitlines()
        assert lines == sorted(set(lines))
        assert all(re.fullmatch(r"[a-z0-9-]+==\d[\w.]*( +--hash=sha256:[0-9a-f]{64}){1,2}", line) for line in lines)
        pinned = {re.split("==| ", line)[0]: re.split("==| ", line)[1] for line in lines}
        for requirement in map(Requirement, wanted):
            found = pinned[requirement.name.lower().replace("_", "-")]
            assert requirement.specifier.contains(found), f"{requirement} and {found}"


def test_what_the_recipe_copies_is_there_and_not_ignored() -> None:
    kept = [line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    copies = [rest.split() for word, rest in steps() if word == "COPY" and not rest.startswith("--from")]
    sources = {source for *sources, _ in copies for source in sources}
    for source in sources:
        assert (ROOT / source).exists()
        assert source in kept
    # The wheel is built of what was copied.
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["force-include"], *(package.split("/")[0] for package in wheel["packages"])} <= sources


def test_labels_say_what_the_project_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (labels,) = [rest for word, rest in stages()[-1] if word == "LABEL"]
    found = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', labels))
    assert (found["title"], found["version"], found["licenses"]) == (
        project["name"], project["version"], project["license"],
    )  # fmt: skip
    assert project["description"].startswith(found["description"])
    arguments = [rest.partition("=")[0] for word, rest in stages()[-1] if word == "ARG"]
    assert {found["revision"], found["base.name"]} == {f"${{{name}}}" for name in arguments}
