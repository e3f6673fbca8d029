"""TLS by one option: only clients and workers that have the certificate can join."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from distributed import Client, Scheduler
from distributed.security import Security

from distmm import clusters
from distmm.all_workers import workers_of
from distmm.errors import InputError
from distmm.submit import dashboard_access, tls
from tests.until import until


@pytest.fixture(scope="module")
def secure() -> Iterator[Client]:
    with clusters.local("cpu", workers=1, memory_limit="1GB", tls="temporary") as client:
        yield client


def test_all_links_of_a_cluster_with_tls_are_encrypted(secure: Client) -> None:
    assert secure.scheduler_info()["address"].startswith("tls://")
    (worker,) = workers_of(secure)
    assert worker.startswith("tls://")
    assert secure.submit(sum, [1, 2]).result(timeout=30) == 3


def test_dashboards_listen_on_localhost_only(secure: Client) -> None:
    on_workers = secure.run(lambda dask_worker: dask_worker.http_server.address).values()
    on_scheduler = secure.run_on_scheduler(lambda dask_scheduler: dask_scheduler.http_server.address)
    assert {on_scheduler, *on_workers} == {"127.0.0.1"}


@pytest.mark.parametrize("stranger", ["plain", "without certificate", "with another certificate"])
def test_a_client_without_the_certificate_cannot_join(secure: Client, stranger: str) -> None:
    address = secure.scheduler_info()["address"]
    security = {
        "plain": None,
        "without certificate": Security(tls_ca_file=secure.security.tls_ca_file, require_encryption=True),
        "with another certificate": tls.security("temporary"),
    }[stranger]
    if stranger == "plain":
        address = address.replace("tls://", "tcp://")

    async def join() -> None:  # Dask's synchronous client starts a thread, and fails if that takes 10 seconds
        client = Client(address, security=security, timeout=2, set_as_default=False, asynchronous=True)
        try:
            await client
        finally:
            await client.close()

    with pytest.raises((OSError, TypeError)):
        asyncio.run(join())
    assert _members(secure) <= {secure.id, "0"}


def test_a_worker_with_another_certificate_cannot_join(
    secure: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = tls.certificate_paths("temporary", str(tmp_path), "others")
    assert others is not None
    tls.create(others)
    command = [sys.executable, "-m", "dask", "worker", secure.scheduler_info()["address"], "--no-nanny"]
    with subprocess.Popen(
        [*command, "--no-dashboard", "--host", "127.0.0.1"],
        env=os.environ | dashboard_access.environment(tls.settings(others)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as worker:
        try:
            logging.getLogger("distributed.comm.tcp").addHandler(caplog.handler)  # some versions do not propagate
            until(lambda: "TLS handshake failed" in caplog.text)
            assert _members(secure) <= {secure.id, "0"}
        finally:
            worker.kill()
            logging.getLogger("distributed.comm.tcp").removeHandler(caplog.handler)


def _members(client: Client) -> set[str]:
    """Return the clients, and the names of the workers, that the scheduler knows."""

    def members(dask_scheduler: Scheduler) -> list[str]:
        names = [str(worker.name) for worker in dask_scheduler.workers.values()]
        return [*(name for name in dask_scheduler.clients if name != "fire-and-forget"), *names]

    return set(client.run_on_scheduler(members))


@pytest.mark.minutes
def test_certificates_in_a_folder_are_for_their_owner_only_and_join(tmp_path: Path) -> None:
    folder = tmp_path / "job.tls"
    places = tls.certificate_paths("temporary", str(tmp_path), "job")
    assert places is not None
    tls.create(places)
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in (folder, *places.values())] == [0o700] + [0o600] * 3
    before = (folder / "key.pem").read_bytes()
    tls.create(places)  # a job that is submitted again uses its old certificates
    assert (folder / "key.pem").read_bytes() == before
    with (
        clusters.local("cpu", workers=1, memory_limit="1GB", dashboard=None, tls=str(folder)) as client,
        clusters.connect(client.scheduler_info()["address"], tls=str(folder)) as other,
    ):
        assert other.submit(sum, [1, 2]).result(timeout=30) == 3
    os.chmod(places["key"], 0o644)
    with pytest.raises(InputError, match=r"key.pem can be read by others; type chmod 600"):
        tls.security(str(folder))


def _valid_for(days: int, places: tls.Certificates) -> None:
    """Replace certificates by those of Dask as they are so many days before their end."""
    key = serialization.load_pem_private_key(Path(places["key"]).read_bytes(), None)
    assert isinstance(key, rsa.RSAPrivateKey)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dask-internal")])
    end = datetime.now(UTC) + timedelta(days=days, hours=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 7, end - timedelta(days=365), end)
    text = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    for what in ("ca", "cert"):
        Path(places[what]).write_bytes(text)


@pytest.mark.parametrize(("days", "again"), [(-1, True), (29, True), (31, False)])
def test_temporary_certificates_that_end_soon_are_made_anew(tmp_path: Path, days: int, again: bool) -> None:
    places = tls.certificate_paths("temporary", str(tmp_path), "job")
    assert places is not None
    tls.create(places)
    _valid_for(days, places)
    before = Path(places["key"]).read_bytes()
    tls.create(places)
    assert (Path(places["key"]).read_bytes() != before) == again
    tls.check(places)
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in places.values()] == [0o600] * 3


def test_own_certificates_that_have_expired_or_are_none_are_refused(tmp_path: Path) -> None:
    places = tls.certificate_paths("temporary", str(tmp_path), "job")
    assert places is not None
    tls.create(places)
    _valid_for(-1, places)
    with pytest.raises(InputError, match=r"ca.pem has expired on 20\d\d-\d\d-\d\d; put a new certificate there"):
        tls.security(str(tmp_path / "job.tls"))
    Path(places["ca"]).write_text("no certificate")
    with pytest.raises(InputError, match=r"ca.pem is not a certificate in PEM"):
        tls.security(str(tmp_path / "job.tls"))


def test_a_folder_without_certificates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no .*ca.pem"):
        tls.security(str(tmp_path))


def test_temporary_certificates_do_not_open_a_running_cluster() -> None:
    with pytest.raises(InputError, match="give the folder"), clusters.connect("tcp://10.0.0.1:8786", tls="temporary"):
        pass
