"""What the documentation shows is so: its snippets run, its messages are in the code, its links and keys are there."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import typer
from distributed import Client
from typer.testing import CliRunner

import distmm
from distmm import clusters
from distmm.cli.app import app
from distmm.submit import jobfile
from tests.deploy.snippets import MARKS, PAGES, READMES, ROOT, Block, blocks, name_of

SITE = ROOT / "deploy" / "site"
REFERENCE = SITE / "pages" / "reference"
JOB_FILES = {"slurm": ROOT / "deploy/slurm/one_node.toml", "kubernetes": ROOT / "deploy/kubernetes/job.toml"}


def having(*languages: str, marks: set[str], among: list[Path] = PAGES) -> Any:
    """Parametrise over the pages that have such blocks."""
    found = [path for path in among if any(block.mark in marks for block in blocks(path, *languages))]
    return pytest.mark.parametrize("page", found, ids=name_of)


@pytest.fixture
def started(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An empty folder, and the cluster of the tests in place of a local one that each snippet would start anew.

    Each start adds an element to the list.
    """
    start, starts = clusters.connect, list[str]()

    @contextmanager
    def connect(where: str = "local", *, tls: str = "none", **options: Any) -> Iterator[Client]:
        if where == "local" and tls == "none":
            where, options = client.scheduler.address, {}
        with start(where, tls=tls, **options) as connected:
            yield connected

    @contextmanager
    def local(*given: Any, **options: Any) -> Iterator[Client]:
        starts.append("local")
        with client.as_current():
            yield client

    monkeypatch.chdir(tmp_path)
    before = client.run(os.getcwd)
    client.run(os.chdir, str(tmp_path))  # Dask's workers write to relative paths of their own
    monkeypatch.setattr(clusters, "connect", connect)
    monkeypatch.setattr(clusters, "local", local)
    yield starts
    for worker, folder in before.items():
        client.run(os.chdir, folder, workers=[worker])


def test_every_block_says_what_it_is() -> None:
    unknown = [
        f"{block.place}: {block.language} {block.mark}"
        for path in PAGES
        for block in blocks(path, "python", "sh", "bash", "shell", "console")
        if block.mark not in MARKS or block.language not in ("python", "sh")
    ]
    assert unknown == []


@pytest.mark.minutes
@having("python", marks={""}, among=[*PAGES, *READMES])
def test_python_runs_as_a_script_in_a_folder_of_its_own(
    page: Path, client: Client, started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, block in enumerate(blocks(page, "python")):
        if block.mark:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        client.run(os.chdir, str(folder))
        script = folder / "script.py"
        script.write_text(block.text)
        started.clear()
        runpy.run_path(str(script), run_name="__main__")
        if started:  # then each worker imports the script, under this name
            started.clear()
            runpy.run_path(str(script), run_name="__mp_main__")
            assert started == [], f"{block.place} starts a cluster while a worker imports it"


@pytest.mark.minutes
@having("python", marks={"script"})
def test_scripts_run_as_programs_of_their_own_and_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "python"):
        if block.mark == "script":
            (tmp_path / "script.py").write_text(block.text)
            done = subprocess.run(
                [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{block.place}\n{done.stderr}"
            said = re.sub(r"seed \d+", "seed …", done.stdout.strip())
            assert f"It prints `{said}`." in page.read_text()


@pytest.mark.minutes
@having("sh", marks={""})
def test_commands_run(page: Path, started: list[str]) -> None:
    for block in blocks(page, "sh"):
        for program, *arguments in block.commands if not block.mark else ():
            assert program == "distmm", f"{block.place}: {program} is not run here; mark the block"
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, f"{block.place}: {arguments}\n{done.output}"


def test_the_loop_of_resume_leaves_the_shell_open_and_has_the_last_exit_code() -> None:
    (loop,) = (block for block in blocks(SITE / "pages/howto/resume.md", "sh") if block.mark == "script")
    stub = "count=0; distmm() { count=$((count + 1)); [ $count -gt 2 ] && return 2; return 75; }\n"
    done = subprocess.run(
        ["bash", "-c", f"{stub}{loop.text}\necho $code after $count"], stdout=-1, text=True, check=True
    )
    assert done.stdout == "2 after 3\n"


def parse(arguments: list[str], place: str) -> None:
    """Have the command line read these arguments, as far as to the work."""
    command: Any = typer.main.get_command(app)
    arguments = [argument for argument in arguments if argument not in ("-h", "--help", "--version", "--debug")]
    while arguments and hasattr(command, "commands"):
        assert arguments[0] in command.commands, f"{place}: there is no command {arguments[0]}"
        command = command.commands[arguments.pop(0)]
    command.make_context("distmm", arguments)


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=name_of)
def test_what_cannot_run_here_is_read_by_what_would_run_it(page: Path) -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for block in blocks(page, "sh", "python"):
        if block.language == "python":
            compile(block.text, block.place, "exec")
            continue
        subprocess.run(["bash", "-n", "-c", block.text], check=True)
        for program, *arguments in block.commands:
            if program == "distmm":
                parse(arguments, block.place)
            if program == "pip":
                asked = {
                    extra for word in arguments for some in re.findall(r"\[(.*)\]", word) for extra in some.split(",")
                }
                assert asked <= extras, block.place


def dry_runs() -> Iterator[Any]:
    for path in PAGES:
        for block in blocks(path, "sh"):
            for number, command in enumerate(block.commands):
                if block.mark in JOB_FILES and command[:2] == ["distmm", "submit"]:
                    yield pytest.param(block, command[1:], id=f"{block.place}-{number}")


@pytest.mark.parametrize(("block", "arguments"), [*dry_runs()])
def test_job_files_of_the_pages_are_rendered(
    block: Block, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB_FILES[block.mark].read_text())
    done = CliRunner().invoke(app, [*(word for word in arguments if word != "--dry-run"), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert ("#SBATCH" if block.mark == "slurm" else "kind: DaskJob") in done.output


def test_readme_has_the_two_commands() -> None:
    commands = [
        line.partition("#")[0].strip() for block in blocks(ROOT / "README.md", "sh") for line in block.text.splitlines()
    ]
    assert "pip install . && distmm demo" in commands
    assert "pip install '.[test]' && pytest" in commands


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=name_of)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    targets = {unquote(link.partition("#")[0]) for link in re.findall(r"\]\(([^()\s]+)\)", text) if ":" not in link}
    assert sorted(target for target in targets if target and not (page.parent / target).is_file()) == []


def constants() -> str:
    """Every string of the code, without what f-strings put in."""
    found = []
    for path in (ROOT / "distmm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_messages_that_are_explained_are_in_the_code() -> None:
    text = (SITE / "pages/howto/troubleshooting.md").read_text()
    messages = re.findall(r"^### `(.*)`$", text, re.MULTILINE)
    assert len(messages) > 10
    code = constants()
    pieces = {piece.strip(" .,()[]") for message in messages for piece in message.split("…")}
    assert sorted(piece for piece in pieces if piece not in code) == []


def test_every_row_of_a_plan_is_explained() -> None:
    table = set(re.findall(r"^\| ([\w ]+?) \|", (SITE / "pages/howto/read_a_plan.md").read_text(), re.MULTILINE))
    assert {label for label, _ in distmm.plan(np.ones((3, 4)), np.ones((4, 5))).rows()} <= table


def test_reference_has_every_public_name() -> None:
    text = (REFERENCE / "api.md").read_text()
    named = set(re.findall(r"^   (distmm\.[\w.]+)$", text, re.MULTILINE))
    assert {f"distmm.{name}" for name in distmm.__all__} <= named
    for name in named:
        module, _, attribute = name.removeprefix("distmm.").rpartition(".")
        __import__(f"distmm.{module}".rstrip("."))
        assert getattr(sys.modules[f"distmm.{module}".rstrip(".")], attribute).__doc__


def test_reference_has_every_key_of_job_files_and_its_default(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[product]\na = "A.zarr"\nb = "B.zarr"\nc = "C.zarr"\n')
    job = jobfile.load(tmp_path / "job.toml", ())
    text = (REFERENCE / "configuration.md").read_text()
    found: dict[str, dict[str, Any]] = {}
    for table, body in re.findall(r"^### `\[(\w+)\]`(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL):
        for keys, default in re.findall(r"^\| (`.*?`) \| (.*?) \|", body, re.MULTILINE):
            found.setdefault(table, {}).update(dict.fromkeys(re.findall(r"`(\w+)`", keys), default.strip("`")))
    tables = {name: vars(table) for name, table in vars(job).items()}
    assert {name: set(keys) for name, keys in found.items()} == {name: set(keys) for name, keys in tables.items()}
    own = {("product", name) for name in "abc"} | {("run", "folder")}  # paths that start at the job file
    for table, keys in found.items():
        for key, default in keys.items():
            if (table, key) not in own:
                assert tomllib.loads(f"x = {default}")["x"] == tables[table][key], f"{table}.{key}"


def test_reference_has_every_exit_code() -> None:
    codes = set(re.findall(r"^\| (\d+) \|", (REFERENCE / "cli.md").read_text(), re.MULTILINE))
    assert codes == set(re.findall(r"\d+", str(app.info.epilog)))


def test_links_of_the_built_site_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="here">A</h1><a href="b.html#there">b</a><a href="https://x.org">x</a>')
    (tmp_path / "b.html").write_text('<a href="a.html#here">a</a><a href="#away">b</a><img src="c.png">')
    done = subprocess.run(
        [sys.executable, SITE / "check_links.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout.split("\n")[:-1] == ["a.html: b.html#there", "b.html: #away", "b.html: c.png"]
