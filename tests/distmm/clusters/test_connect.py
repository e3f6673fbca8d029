"""Failed connections: the error, and that no client is left. In this module no other test opens a client."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from distributed import default_client

from distmm import clusters
from distmm.errors import InputError
from distmm.product.context import computing
from distmm.submit import tls as certificates


def test_a_cluster_that_cannot_be_reached_leaves_no_client_behind() -> None:
    failed = []
    for address in ("carrier://pigeon:1", "tcp://127.0.0.1:1"):
        with pytest.raises(InputError) as error, clusters.connect(address, timeout=0.3):
            pass
        failed.append(error)  # the traceback keeps the failed client alive
        assert computing() is None
        with pytest.raises(ValueError, match="No clients found"):
            default_client()


@pytest.mark.parametrize("protocol", ["tcp", "tls"])
def test_a_port_where_nobody_answers_is_an_error_within_the_timeout(protocol: str, tmp_path: Path) -> None:
    """Dask's client would wait for ever for a server that accepts the connection and sends nothing."""
    places = certificates.certificate_paths("temporary", str(tmp_path), "test")
    assert places is not None
    certificates.create(places)
    folder = os.path.dirname(places["key"]) if protocol == "tls" else "none"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"{protocol}://127.0.0.1:{silent.getsockname()[1]}"
        with (
            pytest.raises(InputError, match=rf"no scheduler answers at .* within 0.3 s \(\w.*does it speak {protocol}"),
            clusters.connect(address, timeout=0.3, tls=folder),
        ):
            pass


def test_an_encrypted_cluster_needs_certificates() -> None:
    with (
        pytest.raises(InputError, match="is encrypted: give the folder with its certificates"),
        clusters.connect("tls://127.0.0.1:1"),
    ):
        pass


def test_a_limit_below_what_a_worker_takes_by_itself_is_refused() -> None:
    with (
        pytest.raises(InputError, match="memory limit 299MB is less than the 300 MB"),
        clusters.local("cpu", memory_limit="299MB"),
    ):
        pass
