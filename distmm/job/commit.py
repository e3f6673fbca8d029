"""The end of a job: all units have markers, C gets its name and its certificate, and the job's folder is removed.

Each of these steps is on the disk before the next one begins:

1. All blocks have their names.
2. The certificate is in the job's folder. The job is now complete: no block is computed any more.
3. C has its final name.
4. The certificate is next to C.
5. The manifest is removed.

Each step can be repeated. After a kill or a loss of power between two steps, `end_complete` does the remaining ones.
The checksums in the certificate tell whether C already has its final name. So a product that is added to an existing C
(beta) is added exactly once.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NoReturn

from distributed import Client

from distmm.errors import InputError
from distmm.job.certificate import damaged, holds
from distmm.job.contents import Contents
from distmm.job.folder import Folder, Json, write_json
from distmm.job.inputs import Inputs
from distmm.job.lock import Lock, locked
from distmm.job.records import complete_job, read_certificate, read_manifest
from distmm.job.spec import Spec, differences
from distmm.job.target import Target, Unit
from distmm.storage import file_of, is_there, is_url, output_type, stamp_of
from distmm.telemetry.job_events import JOB_TOPIC


def finish(folder: Folder, content: Json, lock: Lock) -> None:
    """Give a complete C its final name. `content` is its certificate."""
    Lock.check(folder.path, lock.token)
    write_json(folder.pending_certificate, content)
    Lock.check(folder.path, lock.token)
    output_type(folder.target)(folder.target, folder.draft, content["output"]["overwrite"]).commit()
    _clean(folder, content, lock)


def end_complete(folder: Folder, overwrite: bool) -> Json | None:
    """End a job that was complete when its process died, and remove leftover files of a job that had ended.

    Parameters
    ----------
    folder : Folder
    overwrite : bool
        Whether the caller will discard an unfinished job. An unreadable manifest is then ignored.

    Returns
    -------
    dict or None
        The certificate of the job that was ended. None if there was no complete job.

    Raises
    ------
    InputError
        For errors of the disk, and if another job has the lock.
    """
    if not _begun(folder) or (folder.exists() and complete_job(folder, overwrite) is None):
        return None
    try:
        if not folder.exists():
            folder.check_leftovers()
        with locked(folder.path) as lock:
            owned = folder.owned(lock.token)
            if not folder.exists():
                owned.clear()
                return None
            job = complete_job(owned, overwrite)
            return None if job is None else _complete(job, lock, overwrite)
    except OSError as error:
        raise InputError(
            f"{error.filename or folder.path}: {error.strerror}: the complete job that was found there cannot be "
            f"ended; remove the cause, and call again"
        ) from error


def _complete(folder: Folder, lock: Lock, overwrite: bool) -> Json | None:
    """Give C its final name, unless it has it, and clean up. None if its blocks are not as they were written."""
    content = read_certificate(folder, folder.pending_certificate)
    assert content is not None
    contents, replaces, in_store = Contents.described(content), content["output"]["overwrite"], is_url(folder.target)
    if in_store or not holds(folder.target, content):
        if overwrite and not in_store and os.path.lexists(folder.target):
            return None  # the file or folder from before the job still has C's name
        if in_store:  # blocks already have their final names, and are checked by their tags
            target = contents.reopen(folder.target, folder, content["blocks"], replaces)
            whole = not target.missing({(block["i"], block["j"]): block for block in content["done"]})
        else:
            whole = holds(folder.draft, content)
        if not whole:
            folder.store.remove(folder.pending_certificate)  # the next run checks each block
            return None
        Lock.check(folder.path, lock.token)
        try:
            if not in_store:
                contents.refuse(content["output"]["name"], replaces)
            output_type(folder.target)(folder.target, folder.draft, replaces).commit()
        except InputError:
            if in_store and overwrite:
                return None  # another program has created an array in the meantime, which may be replaced
            raise
    folder.store.sync(os.path.dirname(folder.target))
    _clean(folder, content, lock)
    return content


def _begun(folder: Folder) -> bool:
    """Whether a job has left any files, for example a lock."""
    return bool(folder.store.names(folder.path)) if is_url(folder.path) else os.path.isdir(folder.path)


def complete_result(folder: Folder, spec: Spec, overwrite: bool, client: Client | None) -> Json | None:
    """Return the certificate of a complete C that is the result of the same call. None otherwise.

    None also while a job of C is unfinished, and for a call that will `overwrite` C.

    Raises
    ------
    InputError
        If the product reads C, and C is already its result. If it does not, and C, A or B has changed since.
    """
    begun = overwrite or folder.exists()
    content = read_certificate(folder) if not begun and is_there(folder.target) else None
    if content is None or not same_call(folder, content, spec):
        return None
    same, adds = holds(folder.target, content, client), bool(spec.reads(folder.target))
    if same and adds:
        refuse_twice(folder)
    if not same and not adds:
        raise changed(folder)
    if same:
        refuse_stale(folder, content, spec, client)
    return content if same else None


def changed(folder: Folder) -> InputError:
    """Return the error for a C that has changed since its job completed it."""
    return InputError(
        f"{folder.target}: has changed since the job that {folder.certificate} describes completed it: restore it, or "
        f"compute it again with --overwrite (overwrite=True)"
    )


def refuse_stale(folder: Folder, content: Json, spec: Spec, client: Client | None) -> None:
    """Raise `InputError` if an input of a complete C has changed since, except a C0 that C has replaced."""
    before = {name: stamp for name, stamp in content["stamps"].items() if name not in spec.reads(folder.target)}
    Inputs.of(content, spec, client).unchanged(before, content["done"])


def same_call(folder: Folder, content: Json, spec: Spec) -> bool:
    """Whether C is the result of the same call. A C0 that C has replaced is not compared."""
    before, now = dict(content["spec"]), spec.json()
    if "C0" in spec.reads(folder.target):
        paths = [(c0 or {}).get("path", "") for c0 in (before.pop("C0"), now.pop("C0"))]
        if len({os.path.realpath(file_of(path)) for path in paths}) > 1:
            return False
    return not any(differences(before, now))


def refuse_twice(folder: Folder) -> NoReturn:
    """Refuse a call that reads C, if C is already its result: a second call would apply the product twice."""
    raise InputError(
        f"{folder.target}: is already the result of the same call, which reads C0 from there; nothing was done. To "
        f"apply it once more, call with --overwrite (overwrite=True)"
    )


def _clean(folder: Folder, content: Json, lock: Lock) -> None:
    """Write the certificate next to C, which has its final name, and remove all other files of the job."""
    Lock.check(folder.path, lock.token)
    spec = content["spec"]
    # An unchecked product has no certificate, unless it was added to a C: a repeated call must find that it has ended.
    if spec["check"] != "none" or spec["beta"] != 0:
        content = {**content, "stamp": stamp_of(folder.target)}
        write_json(folder.certificate, content, folder.work)
    elif folder.store.exists(folder.certificate):  # the certificate of the C that was replaced
        folder.store.discard(folder.certificate, folder.work)
        folder.store.sync(os.path.dirname(folder.certificate))
    folder.clear()


def refuse_another_draft(folder: Folder, manifest: Json, target: Target) -> None:
    """Raise `InputError` if the file or folder that C is written to was changed after the job had begun."""
    before, now = manifest["draft"], target.description()
    changed = [f"{name} was {before.get(name)}, is {now[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        raise InputError(
            f"{folder.draft}: has been changed since distmm created it: {'; '.join(changed)}; restore the original, "
            f"or start over with --overwrite"
        )


def trusted_units(client: Client, folder: Folder, units: set[Unit], target: Target) -> dict[Unit, Json]:
    """Return the markers of the units that are as they were written, and remove the other markers.

    The workers of `client` read the units again. `units` are all units of the result.
    """
    markers, strays = folder.read_markers()
    for path in strays:
        folder.store.remove(path)
    # Found here, because a missing chunk would be read as zeros.
    strange = markers.keys() - units
    bad = strange | target.missing({at: marker for at, marker in markers.items() if at not in strange}).keys()
    there = [marker for at, marker in markers.items() if at not in bad]
    if there:
        bad |= damaged(client, target.written(), there).keys()
    drop_markers(client, folder, bad)
    return {at: marker for at, marker in markers.items() if at not in bad}


def drop_markers(client: Client, folder: Folder, units: Collection[Unit]) -> None:
    """Remove the markers of units, so that they are computed again."""
    for i, j in units:
        client.log_event(JOB_TOPIC, {"event": "rejected", "job": "", "blocks": [(i, j)]})
        folder.store.remove(folder.marker(i, j))


def complete_units(folder: Folder, units: set[Unit], manifest: Json, target: Target) -> list[Json]:
    """Return the markers of all units, if no part of the result is missing. Elements are not read.

    Parameters
    ----------
    folder : Folder
    units : set of tuple
        All units of the result.
    manifest : dict
        The manifest that this run has written.
    target : Target

    Raises
    ------
    InputError
        With the name of the file that is missing or has changed. A resumed run reads all units again, and computes
        the lost ones.
    """
    if read_manifest(folder)["sha256"] != manifest["sha256"]:
        raise InputError(f"{folder.manifest}: was replaced while the job ran")
    refuse_another_draft(folder, manifest, target)
    markers, strays = folder.read_markers()
    if strays:
        raise InputError(f"{strays[0]}: is not a marker that this job has written for this block")
    for at in sorted(units ^ markers.keys()):
        what = "is missing, although its block was written" if at in units else "is of a block that C lacks"
        raise InputError(f"{folder.marker(*at)}: {what}")
    missing = target.missing(markers)
    if missing:
        where = os.path.join(folder.draft, missing[min(missing)])
        raise InputError(
            f"{where}: is missing or incomplete, although it was written; so are {len(missing) - 1} other blocks"
        )
    return list(markers.values())
