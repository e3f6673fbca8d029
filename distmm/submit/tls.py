"""TLS settings: ``none``, ``temporary`` certificates, or a folder with ``ca.pem``, ``cert.pem`` and ``key.pem``.

All roles use one certificate, and only its holders can join: Dask checks it on both ends of each connection. UCX does
not encrypt, so a cluster with TLS uses TCP.
"""

from __future__ import annotations

import os
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distmm.errors import InputError

if TYPE_CHECKING:
    from distributed.security import Security

Certificates = dict[str, str]  # "ca", "cert" and "key": paths of PEM files

ROLES = ("client", "scheduler", "worker")

# Temporary certificates are valid for a year. They are replaced if they expire sooner than this: a job may take weeks.
LEAST_DAYS = 30


def certificate_paths(switch: str, folder: str, name: str) -> Certificates | None:
    """Return the paths of a job's certificates, which may not exist yet; None without TLS.

    Parameters
    ----------
    switch : str
        ``"none"``, ``"temporary"``, or a folder.
    folder, name : str
        Folder and name of the job; temporary certificates go to ``folder/name.tls``.
    """
    if switch == "none":
        return None
    home = Path(folder).absolute() / f"{name}.tls" if switch == "temporary" else Path(switch)
    return {what: str(home / f"{what}.pem") for what in ("ca", "cert", "key")}


def settings(certificates: Certificates | None) -> dict[str, Any]:
    """Return Dask's configuration with which its programs use certificates and refuse unencrypted connections."""
    if certificates is None:
        return {}
    files = {f"distributed.comm.tls.{role}.{what}": certificates[what] for role in ROLES for what in ("cert", "key")}
    return {"distributed.comm.require-encryption": True, "distributed.comm.tls.ca-file": certificates["ca"], **files}


def create(certificates: Certificates) -> None:
    """Make temporary certificates that only this user can read.

    Existing ones are kept for the next run of the job, unless they expire within `LEAST_DAYS`.
    """
    key = Path(certificates["key"])
    if key.exists() and _expiry(certificates["cert"]) - datetime.now(UTC) > timedelta(days=LEAST_DAYS):
        return
    made = _temporary()
    key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key.parent.chmod(0o700)
    contents = {"ca": made.tls_ca_file, "cert": made.tls_client_cert, "key": made.tls_client_key}
    for what, text in contents.items():
        Path(certificates[what]).unlink(missing_ok=True)
        # The mode is set when the file is created, so other users can never read it.
        with open(os.open(certificates[what], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)


def check(certificates: Certificates) -> None:
    """Check that certificates exist, have not expired, and that other users cannot read the key.

    Raises
    ------
    InputError
        Otherwise.
    """
    for what, path in certificates.items():
        if not os.path.isfile(path):
            raise InputError(f"TLS: there is no {path}; a folder for tls needs ca.pem, cert.pem and key.pem")
        if what == "key" and os.stat(path).st_mode & 0o077:
            raise InputError(f"TLS: {path} can be read by others; type chmod 600 {shlex.quote(str(path))}")
        if what != "key" and (ends := _expiry(path)) < datetime.now(UTC):
            raise InputError(f"TLS: {path} has expired on {ends:%Y-%m-%d}; put a new certificate there")


def prepared(switch: str, folder: str, name: str) -> Certificates | None:
    """Return the paths of checked certificates; None without TLS. Temporary ones are made if needed.

    The parameters are those of `certificate_paths`.

    Raises
    ------
    InputError
        As `check` does.
    OSError
        For a folder that cannot take temporary certificates.
    """
    certificates = certificate_paths(switch, folder, name)
    if certificates is not None:
        if switch == "temporary":
            create(certificates)
        check(certificates)
    return certificates


def _expiry(path: str) -> datetime:
    """Return when the first certificate of a file expires; never, without the package ``cryptography``."""
    try:
        from cryptography import x509
    except ImportError:
        return datetime.max.replace(tzinfo=UTC)
    try:
        return x509.load_pem_x509_certificate(Path(path).read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise InputError(f"TLS: {path} is not a certificate in PEM format: {error}; put a PEM file there") from error


def security(switch: str) -> Security | None:
    """Return the argument ``security`` of Dask's clusters and clients, for a value of ``--tls``."""
    import dask
    from distributed.security import Security

    if switch == "temporary":
        return _temporary()
    certificates = prepared(switch, "", "")
    if certificates is None:
        return None
    with dask.config.set(settings(certificates)):
        return Security()


def _temporary() -> Any:
    from distributed.security import Security

    try:
        return Security.temporary()
    except ImportError as error:
        raise InputError("TLS: temporary certificates need one more package: type pip install '.[tls]'") from error
