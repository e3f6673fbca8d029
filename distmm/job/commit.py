"""The end of a job: C gets its name and its certificate, and the job's folder is removed.

What must be on the disk before what:

1. all blocks with their names, before the certificate in the job's folder;
2. the certificate in the job's folder, before C gets its name: the job is complete, and nothing is multiplied any more;
3. C's name, before the certificate beside C;
4. the certificate beside C, before the manifest is removed.

Each step can be repeated. After a kill or a loss of power between two steps `settle` does the rest. The checksums in
the certificate tell whether C has its name already. So a product that is added to the C that was there (beta) is added
exactly once.
"""

from __future__ import annotations

import os

from distmm.errors import InputError
from distmm.job.certificate import holds
from distmm.job.folder import Folder, Json, read_json, write_json
from distmm.job.lock import Lock, locked
from distmm.job.manifest import completed
from distmm.job.result import described
from distmm.job.spec import Spec, differences, lies_in
from distmm.storage import fsync, is_url, output_of, reopen_output

__all__ = ["finish", "refuse_twice", "same_call", "settle"]


def finish(folder: Folder, content: Json, lock: Lock) -> None:
    """Give C, which is complete, its name; `content` is its certificate."""
    Lock.check(folder.path, lock.token)
    write_json(folder.pending_certificate, content)
    Lock.check(folder.path, lock.token)
    output_of(folder.target, folder.draft, content["output"]["overwrite"]).commit()
    _clean(folder, content, lock)


def settle(folder: Folder, anew: bool) -> Json | None:
    """End a job that was complete when its process died, and remove the files of a job that had ended.

    Parameters
    ----------
    folder : Folder
    anew : bool
        The job will be discarded, unless C has its name: a manifest that cannot be read is no reason to stop.

    Returns
    -------
    dict or None
        The certificate of a job that was ended now; None where there is none, or where blocks are still missing.
    """
    if not _begun(folder) or (folder.exists() and completed(folder, anew) is None):
        return None
    try:
        with locked(folder.path) as lock:
            owned = folder.owned(lock.token)
            if not folder.exists():
                owned.clear()
                return None
            job = completed(owned, anew)
            return None if job is None else _go_on(job, lock, anew)
    except OSError as error:
        raise InputError(
            f"{error.filename or folder.path}: {error.strerror}: what an earlier job has left there cannot be "
            f"brought to its end; call again, once the cause is gone"
        ) from error


def _go_on(folder: Folder, lock: Lock, anew: bool) -> Json | None:
    """Give C its name, unless it has it, and clean up; None if its blocks are not what they were."""
    content = read_json(folder.pending_certificate)
    if is_url(folder.target):
        return _go_on_in_store(folder, content, lock, anew)
    if not holds(folder.target, content):
        if anew and os.path.lexists(folder.target):
            return None  # what was there before C is still there
        if not holds(folder.draft, content):
            folder.store.remove(folder.pending_certificate)  # a run that goes on looks at each block
            return None
        Lock.check(folder.path, lock.token)
        described(content["spec"]).refuse(content["output"]["name"], content["output"]["overwrite"])
        output_of(folder.target, folder.draft, content["output"]["overwrite"]).commit()
    fsync(os.path.dirname(folder.target))
    _clean(folder, content, lock)
    return content


def _begun(folder: Folder) -> bool:
    """Whether a job has left anything, a lock perhaps."""
    return bool(folder.store.names(folder.path)) if is_url(folder.path) else os.path.isdir(folder.path)


def _go_on_in_store(folder: Folder, content: Json, lock: Lock, anew: bool) -> Json | None:
    """Do the same in an object store, where blocks are in their place already; their tags tell what they are."""
    target = reopen_output(folder.target, folder.draft, content["output"]["overwrite"])
    if target.missing({(block["i"], block["j"]): block for block in content["done"]}):
        folder.store.remove(folder.pending_certificate)
        return None
    Lock.check(folder.path, lock.token)
    try:
        target.output.commit()
    except InputError:
        if anew:
            return None  # another array has come meanwhile, and may be replaced
        raise
    _clean(folder, content, lock)
    return content


def same_call(folder: Folder, content: Json, spec: Spec) -> bool:
    """Whether C was made by just this call, apart from an operand that C has replaced."""
    before, now = dict(content["spec"]), spec.json()
    for name in spec.reads(folder.target):
        if before[name] is None or not lies_in(before[name].get("path", ""), folder.target):
            return False
        before[name], now[name] = before[name]["transposed"], now[name]["transposed"]
    return not any(differences(before, now))


def refuse_twice(folder: Folder, spec: Spec) -> None:
    """Refuse a call which reads C and has already made the C that is there: sent again, it would be applied twice."""
    names = " and ".join(spec.reads(folder.target))
    raise InputError(
        f"{folder.target}: is already the result of this very call, which reads {names} from there; nothing was done. "
        f"To apply it once more, call with --overwrite (overwrite=True)"
    )


def _clean(folder: Folder, content: Json, lock: Lock) -> None:
    """Leave the certificate beside a C that has its name, and remove the rest of the job."""
    Lock.check(folder.path, lock.token)
    spec = content["spec"]
    # An unchecked product leaves none, unless it was added to a C: sent again, it would not be known to have ended.
    if spec["check"] != "none" or spec["beta"] != 0:
        write_json(folder.certificate, content, os.path.join(folder.work, "certificate.draft"))
    elif folder.store.exists(folder.certificate):  # of the C that has been replaced
        folder.store.discard(folder.certificate, folder.work)
        folder.store.sync(os.path.dirname(folder.certificate))
    folder.clear()
