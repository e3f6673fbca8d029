"""An S3 server of the tests' own (moto), which lives in this process, and what its bucket holds."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest
from distributed import Client

from distmm import job

BUCKET = "matrices"

# Environment variables that processes need to reach it.
SERVER: dict[str, str] = {}


@contextmanager
def served(client: Client) -> Iterator[None]:
    """Serve S3 to this process, its children, and the workers of a client."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    SERVER.clear()
    SERVER.update({
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    })  # fmt: skip
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in SERVER.items():
                patch.setenv(name, value)
            client.run(_learn, SERVER)
            store().mkdir(BUCKET)
            yield
    finally:
        client.run(_forget, list(SERVER))
        _forget([])
        server.stop()


def _learn(names: dict[str, str]) -> None:
    os.environ.update(names)


def _forget(names: list[str]) -> None:
    """Leave nothing of the server in a process: variables, and connections that fsspec keeps."""
    for name in names:
        os.environ.pop(name, None)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Zarr opens connections of its own, and closes none
        gc.collect()


def url(stored: str) -> str:
    """The URL of an array."""
    return f"s3://{BUCKET}/{stored}"


def multiply(client: Client, stored: str, plan: str = "g1x2x1 b30x60x60 p1 w4x1 l1", **options: Any) -> job.Summary:
    """Make an array, of eight blocks in waves of two."""
    return job.multiply("in/A.npy", "in/B.zarr", url(stored), client=client, plan=plan, **options)


def whole(stored: str, rows: int = 4) -> set[str]:
    """All that a job leaves, of so many rows of blocks."""
    chunks = {f"{stored}/c/{i}/{j}" for i in range(rows) for j in range(2)}
    return chunks | {f"{stored}/zarr.json", f"{stored}.certificate.json", f"{stored}.report.html"}


def store() -> Any:
    return fsspec.filesystem("s3", use_listings_cache=False)


def objects(prefix: str) -> dict[str, bytes]:
    """All objects whose names begin with a prefix."""
    return {name: store().cat_file(f"{BUCKET}/{name}") for name in tags(prefix)}


def tags(prefix: str) -> dict[str, tuple[str, str]]:
    """The tag and the time of each object: one that is put again has another time."""
    found = store().find(f"{BUCKET}/{prefix.split('/')[0]}", detail=True)
    return {
        name.removeprefix(f"{BUCKET}/"): (facts["ETag"], str(facts["LastModified"]))
        for name, facts in found.items()
        if name.startswith(f"{BUCKET}/{prefix}")
    }


def marked(name: str) -> dict[str, tuple[str, str]]:
    """Markers of the blocks of an array that are finished."""
    return {key: value for key, value in tags(f"{name}.job/").items() if "/done/" in key}


class HalfWay(job.Stop):
    """Asks to stop once two blocks have their markers (`tests.distmm.job.disturbed.HalfWay`)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @property
    def reason(self) -> str | None:
        if len(marked(self.name)) >= 2:
            self.ask("enough")
        return super().reason
