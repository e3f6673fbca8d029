"""The job file: a product and the machines for it, in TOML, the same for this machine, Slurm and Kubernetes.

A job file is data only: it contains no command, no shell text and no Python object. Every value is checked against the
schema before anything starts, and error messages give the line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from distmm.errors import InputError
from distmm.submit.schema import Job, Product, Table

Places = dict[tuple[str, str], str]  # (table, key) -> where it was given, such as "job.toml:7"

# A job file has about forty lines. The limit bounds the time that a hostile file can cost before it is checked.
MOST_BYTES = 64 * 1024

TABLES: dict[str, Any] = {"product": Product} | {
    name: field.annotation for name, field in Job.model_fields.items() if name != "product"
}

# By pydantic's name of the error for a value of a wrong type: what the value should be.
TYPES = {
    "string_type": "text in quotes", "int_type": "a whole number", "bool_type": "true or false",
    "dict_type": 'a table such as { team = "physics" }',
}  # fmt: skip


def load(path: str | Path, changes: Iterable[str] = (), words: Sequence[str] = ()) -> Job:
    """Read and check a job file.

    Parameters
    ----------
    path : str or path
        The file.
    changes : iterable of str
        Keys that replace those in the file, such as ``"workers.nodes=4"``; text without quotes.
    words : sequence of str
        Another command of distmm, with its arguments, that the machines run instead of the product.

    Returns
    -------
    Job
        Paths in ``product.a``, ``b``, ``c``, ``run.folder`` and ``run.tls`` are absolute.

    Raises
    ------
    InputError
        For the first error, as ``file:line: what is wrong; what it should be``.
    """
    path = Path(path)
    text = _read(path)
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        line = re.search(r"at line (\d+)", str(error))
        raise InputError(f"{path}:{line[1] if line else 1}: not TOML: {error}") from error
    # The place of each key, and of each table under the key "".
    places = {("", ""): str(path)} | {place: f"{path}:{line}" for place, line in _lines(text).items()}
    for change in changes:
        _set_key(tables, places, change)
    if not words:
        tables.setdefault("product", {})
    try:
        job = Job.model_validate(tables)
    except ValidationError as error:
        raise InputError(_message(error, places)) from error
    folder = path.resolve().parent
    if set(str(folder)) & set("\"\\'`") or not str(folder).isprintable():
        raise InputError(
            f"{str(path)!r}: is in a folder whose path has quotes, backslashes or unprintable characters, which "
            f"batch scripts cannot contain; move the job file to another folder"
        )
    job = _absolute(job, folder)
    return job.instead(words) if words else job


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise InputError(f"{path}: larger than {MOST_BYTES} bytes: not a job file; give the path of one")
        return raw.decode("utf-8-sig")  # some editors begin a file with a byte-order mark
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; give the path of a job file") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text at byte {error.start}: not a job file; give the path of one"
        ) from error


def _lines(text: str) -> dict[tuple[str, str], int]:
    """Return the line of each table and key; tomllib does not record lines."""
    lines: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*\"?([\w-]+)", line):
            table = header[1]
            lines.setdefault((table, ""), number)
        elif entry := re.match(r"\s*\"?([\w-]+)\"?\s*[=.]", line):
            lines.setdefault((table, entry[1]), number)
    return lines


def _set_key(tables: dict[str, Any], places: Places, change: str) -> None:
    """Set one key as ``--set table.key=value`` says."""
    parts = re.fullmatch(r"(\w+)\.(\w+)=(.*)", change)
    if parts is None:
        raise InputError(f"--set {change}: write it as table.key=value, such as workers.nodes=4")
    table, name, value = parts.groups()
    field = TABLES[table].model_fields.get(name) if table in TABLES else None
    is_text = field is not None and field.annotation is str
    plain = not is_text and re.fullmatch(r"-?[1-9]\d{0,14}|0|true|false", value)
    entries = tables.setdefault(table, {})
    if isinstance(entries, dict):
        entries[name] = tomllib.loads(f"value = {value}")["value"] if plain else value
    places[table, name] = f"--set {change}"
    places.setdefault((table, ""), f"--set {change}")  # the file has no such table


def _message(error: ValidationError, places: Places) -> str:
    """Return the message for the first error: its place, the value, and what it should be."""
    first, *others = error.errors(include_url=False)
    kind, at = first["type"], tuple(map(str, first["loc"]))
    if not at:  # values that exclude each other: the error's type names the key
        return f"{_place(places, *kind.split('.'))}: {first['msg']}"
    table, key = (*at, "")[:2]
    place = _place(places, table, key)
    if table not in TABLES or not key:
        place = places.get((table, "")) or _place(places, "", table)
        return f"{place}: [{table}] is not a table of a job file; known are {', '.join(TABLES)}"
    if kind == "extra_forbidden":
        return f"{place}: [{table}] has no key {key!r}; known are {', '.join(TABLES[table].model_fields)}"
    if kind == "missing":
        missing = [str(one["loc"][1]) for one in (first, *others) if one["type"] == kind and one["loc"][0] == table]
        return f"{place}: [{table}] lacks {', '.join(missing)}"
    return f"{place}: {key} = {_short(first['input'])} is not {expected(first)}"


def _place(places: Places, table: str, key: str) -> str:
    """Return the place of a key, else of its table, else the file."""
    return places.get((table, key)) or places.get((table, "")) or places["", ""]


def expected(error: ErrorDetails) -> str:
    """Return what the value of a key should be."""
    facts = error.get("ctx", {})
    if error["type"] == "literal_error":
        return f"one of {facts['expected']}".replace(" or ", ", ").replace("'", "")
    return TYPES.get(error["type"]) or str(facts["error"])


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _absolute(job: Job, folder: Path) -> Job:
    """Return the job with absolute paths; relative ones start at the job file's folder."""

    def moved(table: Table, *keys: str) -> Table:
        paths = {key: getattr(table, key) for key in keys}
        found = {key: path if "://" in path else str(folder / path) for key, path in paths.items()}
        return table.model_copy(update=found)

    own = () if job.run.tls in ("none", "temporary") else ("tls",)
    product = None if job.product is None else moved(job.product, *"abc")
    return job.model_copy(update={"product": product, "run": moved(job.run, "folder", *own)})
