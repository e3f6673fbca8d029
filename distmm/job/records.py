"""Reads the manifest and the certificate of a job, without Dask and Zarr: `distmm.job.job_status` is fast to start."""

from __future__ import annotations

import hashlib
import json
import re

from distmm.errors import InputError
from distmm.job.folder import Folder, Json, read_json
from distmm.job.json_forms import CERTIFICATE, MANIFEST
from distmm.job.moved import relocated

__all__ = ["FORMAT", "digest", "read_certificate", "read_manifest"]

# Version of the format of manifest and certificate. Format 1 had no id of the job, no hash of the manifest and no
# checksums of the inputs. In format 2 the job's files were not in a subfolder of the lock's owner.
FORMAT = 3


def read_manifest(folder: Folder) -> Json:
    """Read the manifest of a job.

    Raises
    ------
    InputError
        For another format, and for a manifest that was changed after distmm had written it.
    """
    manifest = read_json(folder.manifest)
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{folder.manifest}: has format {manifest.get('format')}, but this version of distmm reads {FORMAT}: "
            f"finish the job with the version that began it, or start over with --overwrite"
        )
    manifest = read_json(folder.manifest, MANIFEST)
    # The id becomes part of a path. The hash is no protection against a forged manifest, so the form of the id is
    # checked, too: it must not lead to another folder.
    if manifest.get("sha256") != digest(manifest) or not re.fullmatch("[0-9a-f]{16}", str(manifest.get("id"))):
        raise InputError(
            f"{folder.manifest}: has been changed since distmm wrote it: restore the original, or start over with "
            f"--overwrite"
        )
    return relocated(manifest, folder.target)


def digest(manifest: Json) -> str:
    """Return the hash that a manifest has of itself."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_certificate(folder: Folder, path: str | None = None) -> Json | None:
    """Return the certificate next to C, or the one at `path`, with the paths that hold now. None if there is none.

    Raises
    ------
    InputError
        If it is damaged.
    """
    path = path or folder.certificate
    return relocated(read_json(path, CERTIFICATE), folder.target) if folder.store.exists(path) else None
