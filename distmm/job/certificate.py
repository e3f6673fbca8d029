"""The certificate of C, a JSON file next to it with the check of each block, and a check of C by its certificate."""

from __future__ import annotations

import os
import secrets
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import dask
import numpy as np
from distributed import Client

from distmm.checking.sketch import VECTORS, VECTORS_OF_INTEGERS
from distmm.checking.verdict import Verdict
from distmm.clusters.waiting import watched
from distmm.errors import InputError
from distmm.job.contents import Contents
from distmm.job.folder import Folder, Json, read_json
from distmm.job.forms import Certificate
from distmm.job.inputs import Inputs
from distmm.job.records import FORMAT, complete_job, read_certificate
from distmm.job.sampled_rows import check_sample
from distmm.job.spec import Spec, differences
from distmm.job.target import Unit, Units
from distmm.product.scalars import checked_seed
from distmm.storage import is_there, open_matrix, stamp_of
from distmm_kernels.tolerance import FORMULA, SIGMAS, Tolerance

WHAT = "C = alpha op(A) op(B) + beta C0: each block compared with sketches of A and B as it was made"
WHAT_OF_REDUCED = (
    "reduction of the rows of C = op(A) op(B): each block of C compared with sketches of A and B before it was "
    "reduced; some rows, chosen at random, computed again from A and all of B and compared with the result"
)

# What a certificate has of the manifest as it is.
FACTS = ("spec", "output", "blocks", "layers", "plan", "seed", "runs", "missing", "stamps")

# What a job did to check C, by its option.
JUDGED = {"none": "did not check it", "full": "compared all of it with A and B", "freivalds": "checked each block"}


def certificate(
    manifest: Json, blocks: Iterable[Json], tolerance: Tolerance | None, seconds: float, sample: Verdict | None
) -> Json:  # fmt: skip
    """Compose the certificate of a complete C.

    Parameters
    ----------
    manifest : dict
    blocks : iterable of dict
        The markers.
    tolerance : Tolerance or None
        None if blocks were not checked.
    seconds : float
        Duration of the last run.
    sample : Verdict or None
        The verdict on the rows of a reduced product that were computed again.

    Returns
    -------
    dict
    """
    blocks = sorted(blocks, key=lambda block: (block["i"], block["j"]))
    residuals = [block["residual"] for block in blocks if block.get("residual") is not None]
    bound = None
    if tolerance is not None:
        facts = {name: getattr(tolerance, name) for name in ("k", "u", "u_in", "u_out", "eta")}
        bound = {"formula": "integers agree to the bit" if tolerance.exact else FORMULA, "SIGMAS": SIGMAS, **facts}
    return {
        "format": FORMAT,
        "job": manifest["id"],
        "what": WHAT if manifest["spec"]["reduction"] is None else WHAT_OF_REDUCED,
        **{name: manifest[name] for name in FACTS},
        "vectors": 0 if tolerance is None else VECTORS_OF_INTEGERS if tolerance.exact else VECTORS,
        "bound": bound,
        "largest_residual": max(residuals, default=None),
        "judged": dict(Counter(block.get("how", "not judged") for block in blocks)),
        "rejected": manifest["rejected"],
        "seconds": seconds,
        **({} if sample is None else {"sample": {"outcome": sample.outcome, "message": sample.message}}),
        "done": blocks,
    }


def damaged(client: Client | None, units: Units, markers: Iterable[Json]) -> dict[Unit, str]:
    """Read units, and find those that are not as they were written.

    Parameters
    ----------
    client : distributed.Client or None
        Its workers read. None: this process reads.
    units : Units
    markers : iterable of dict

    Returns
    -------
    dict
        The messages, by unit.
    """
    markers = list(markers)
    if client is None:
        found = [units.check(marker) for marker in markers]
    else:
        found = client.gather(client.map(units.check, markers, pure=False, batch_size=1000))
    return {(m["i"], m["j"]): message for m, message in zip(markers, found, strict=True) if message is not None}


def holds(path: str, content: Json, client: Client | None = None) -> bool:
    """Whether a file or folder is the C of a certificate.

    A C with the stamp of the certificate was not written since. Otherwise all blocks are read, by the workers of
    `client` or by this process, and their checksums are compared.
    """
    if not is_there(path):
        return False
    if content.get("stamp") == stamp_of(path):
        return True
    try:
        units = Contents.described(content).complete(path, content)
    except InputError:  # an old C of another kind, or one that is partly removed
        return False
    return units is not None and not damaged(client, units, content["done"])


def recheck(path: str | os.PathLike[str], client: Client | None = None, seed: int | None = None) -> Verdict:
    """Check a C by its certificate: each block by its checksum, then A, B and C by Freivalds' test.

    The verdict is "cannot tell" if C is what the job wrote, but cannot be compared with A and B: one of them has
    changed or is missing, a C0 was added (beta), which C usually replaces, or C is boolean.

    Parameters
    ----------
    path : str or path
        Path or URL of C.
    client : distributed.Client, optional
        Its workers read. By default this process reads.
    seed : int, optional
        Seed of the random vectors, or of the choice of rows of a reduced product. By default a random one.

    Returns
    -------
    Verdict

    Raises
    ------
    InputError
        If C or its certificate is missing, or if its job was killed before the certificate was written next to C.
    """
    seed = None if seed is None else checked_seed(seed)
    folder = Folder.of(path)
    _refuse_unended(folder)
    content = read_certificate(folder)
    if content is None:
        raise InputError(
            f"{folder.certificate}: there is no certificate of {folder.target}; with A and B: distmm verify A B C"
        )
    spec = content["spec"]
    contents = Contents.described(content)
    units = contents.complete(folder.target, content)
    if units is None:
        return Verdict("wrong", np.inf, f"{folder.target} is not what the job wrote: its shape, type or kind differs")
    with watched(client):
        bad = damaged(client, units, content["done"])
    if bad:
        (i, j), message = next(iter(sorted(bad.items())))
        where = f"{len(bad)} {contents.name} of {folder.target} are damaged, the first is C[{i}, {j}]"
        return Verdict("wrong", np.inf, f"{where}: {message}")
    missing = "".join(f"; {path}: {what}" for path, what in content["missing"].items())
    kept = f"all {len(content['done'])} {contents.name} are what was written{missing}"
    problem = _not_comparable(content, client)
    if problem is not None:
        message = (
            f"C is what the job wrote, which {JUDGED[spec['check']]}, but it cannot be compared with A and B now: "
            f"{problem}; {kept}"
        )
        return Verdict("cannot tell", content["largest_residual"] or 0.0, message)
    job = Spec.from_json({**spec, "C0": None, "beta": 0})
    if job.reduction is not None:
        seed = secrets.randbits(32) if seed is None else seed
        with watched(client):
            verdict = check_sample(client, job, folder.target, content, seed).seeded(seed)
    else:
        with dask.config.set({} if client is None else {"scheduler": client.get}):
            verdict = job.verify(open_matrix(path), seed=seed)
    return replace(verdict, message=f"{kept}; {verdict.message}")


def _refuse_unended(folder: Folder) -> None:
    """Refuse a C with its final name whose certificate is still in the job's folder. It would look wrong."""
    job = complete_job(folder, overwrite=True)
    if job is None:
        return
    content = read_json(job.pending_certificate, Certificate)
    next_to_c = read_json(folder.certificate) if folder.store.exists(folder.certificate) else {}
    if next_to_c.get("job") != content.get("job") and holds(folder.target, content):
        raise InputError(
            f"{folder.target}: is the result of a job that was killed, or lost its power, before it wrote the "
            f"certificate next to C; end the job with distmm resume {shlex.quote(folder.target)}, then verify again"
        )


def _not_comparable(content: Json, client: Client | None) -> str | None:
    """Return the reason why C cannot be compared with A and B. None if it can."""
    spec = content["spec"]
    if spec["beta"] != 0:
        return f"C0 was added (beta = {spec['beta']}), which this check cannot take into account"
    if spec["dtype"] == "bool":
        return "C is boolean"
    try:
        now = Spec.from_json(spec)
        if changed := list(differences(spec, now.json())):
            return f"A or B has changed since ({'; '.join(changed)})"
        Inputs.of(content, now, client).unchanged(content["stamps"], content["done"])
    except InputError as error:
        return str(error)
    return None
