"""The job file: one product and the machines for it, in TOML, the same for this machine, Slurm and Kubernetes.

A job file is data only: it holds no command, no shell text and no object, and every value is checked against the
schema, with its line in the message, before anything is started.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from distmm.errors import InputError
from distmm.submit.schema import Job

__all__ = ["Job", "load"]

# A job file has some forty lines. The limit keeps a hostile one from costing time before it is looked at.
MOST_BYTES = 64 * 1024


def load(path: str | Path, changes: Iterable[str] = ()) -> Job:
    """Read and check a job file.

    Parameters
    ----------
    path : str or path
        The file.
    changes : iterable of str
        Keys to set instead of those in the file, such as ``"workers.nodes=4"``; text without quotes.

    Returns
    -------
    Job
        With ``product.a``, ``b``, ``c``, ``run.folder`` and a folder ``run.tls`` made absolute, URLs excepted.

    Raises
    ------
    InputError
        For the first thing that is wrong, as ``file:line: what; what it should be``.
    """
    path = Path(path)
    text = _read(path)
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        line = re.search(r"at line (\d+)", str(error))
        raise InputError(f"{path}:{line[1] if line else 1}: not TOML: {error}") from error
    source = Source(path, {place: f"{path}:{line}" for place, line in _lines(text).items()})
    for change in changes:
        _change(tables, source, change)
    hints = get_type_hints(Job)
    for name, table in tables.items():
        if name not in hints or not isinstance(table, dict):
            where = source.places.get((name, "")) or source.place("", name)
            raise InputError(f"{where}: [{name}] is not a table of a job file; known are {', '.join(hints)}")
    job = Job(**{name: _table(name, kind, tables.get(name, {}), source) for name, kind in hints.items()})
    _check_together(job, source)
    folder = path.resolve().parent
    if set(str(folder)) & set("\"\\'`") or not str(folder).isprintable():
        raise InputError(
            f"{str(path)!r}: lies in a folder whose path has quotes, backslashes or unprintable characters, which "
            f"batch scripts cannot hold; move the job file to another folder"
        )
    return _absolute(job, folder)


@dataclass(frozen=True)
class Source:
    """Where each table, key ``""``, and each key of a table was given."""

    path: Path
    places: dict[tuple[str, str], str]

    def place(self, table: str, key: str) -> str:
        """Return the place of a key, else of its table, else the file."""
        return self.places.get((table, key)) or self.places.get((table, "")) or str(self.path)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise InputError(f"{path}: larger than {MOST_BYTES} bytes: not a job file")
        return raw.decode()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; give the path of a job file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text at byte {error.start}: not a job file") from error


def _lines(text: str) -> dict[tuple[str, str], int]:
    """Find the line of each table and key; tomllib keeps none."""
    lines: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*\"?([\w-]+)", line):
            table = header[1]
            lines.setdefault((table, ""), number)
        elif entry := re.match(r"\s*\"?([\w-]+)\"?\s*[=.]", line):
            lines.setdefault((table, entry[1]), number)
    return lines


def _change(tables: dict[str, Any], source: Source, change: str) -> None:
    """Set one key from the command line."""
    parts = re.fullmatch(r"(\w+)\.(\w+)=(.*)", change)
    if parts is None:
        raise InputError(f"--set {change}: write it as table.key=value, such as workers.nodes=4")
    table, name, value = parts.groups()
    kind = get_type_hints(Job).get(table)
    text = kind is not None and get_type_hints(kind).get(name) is str
    plain = not text and re.fullmatch(r"-?[1-9]\d{0,14}|0|true|false", value)
    entries = tables.setdefault(table, {})
    if isinstance(entries, dict):
        entries[name] = tomllib.loads(f"value = {value}")["value"] if plain else value
    source.places[table, name] = f"--set {change}"


def _table(name: str, kind: type, entries: dict[str, Any], source: Source) -> Any:
    """Check one table against its class."""
    known, hints = {f.name: f for f in fields(kind)}, get_type_hints(kind)
    for entry, value in entries.items():
        place = source.place(name, entry)
        if entry not in known:
            raise InputError(f"{place}: [{name}] has no key {entry!r}; known are {', '.join(known)}")
        if type(value) is not hints[entry]:
            word = {str: "text in quotes", int: "a whole number", bool: "true or false"}[hints[entry]]
            raise InputError(f"{place}: {entry} = {_short(value)} is not {word}")
        check = known[entry].metadata["check"]
        # The default itself, mostly an empty text, is what leaving the key out means.
        wrong = check(value) if check and value != known[entry].default else None
        if wrong:
            raise InputError(f"{place}: {entry} = {_short(value)} is not {wrong}")
    missing = [entry for entry, f in known.items() if entry not in entries and f.default is MISSING]
    if missing:
        raise InputError(f"{source.place(name, '')}: [{name}] lacks {', '.join(missing)}")
    return kind(**entries)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _check_together(job: Job, source: Source) -> None:
    """Refuse values that exclude each other."""
    if job.seconds("grace") >= job.seconds("walltime"):
        raise InputError(
            f"{source.place('run', 'grace')}: grace = {job.run.grace} leaves nothing of walltime = {job.run.walltime}; "
            f"a tenth of it is usual"
        )
    if job.run.tls != "none" and job.workers.transport == "ucx":
        raise InputError(
            f"{source.place('run', 'tls')}: UCX is not encrypted; leave out transport = 'ucx' (TLS over TCP is used) "
            f"or tls"
        )


def _absolute(job: Job, folder: Path) -> Job:
    """Let relative paths start at the job file's folder."""

    def absolute(path: str) -> str:
        return path if "://" in path else str(folder / path)

    p, run = job.product, job.run
    tls = run.tls if run.tls in ("none", "temporary") else absolute(run.tls)
    return replace(
        job,
        product=replace(p, a=absolute(p.a), b=absolute(p.b), c=absolute(p.c)),
        run=replace(run, folder=absolute(run.folder), tls=tls),
    )
