"""Object stores that outputs may go to: S3, Google Cloud Storage and Azure, through fsspec, as inputs come from there.

What makes a job safe on a disk has these forms here:

- *On the disk* (fsync): an object is whole, and will outlive a loss of power, when its put has returned.
- *Made by one only* (``O_EXCL``): a put that fails where the object exists (``If-None-Match: *`` in S3 and Azure,
  ``ifGenerationMatch=0`` in Google's store). All three packages call it ``mode="create"``.
- *Renamed*: stores have no rename. An array appears when its last object is put (`distmm.storage.zarr_objects`).
- *Unchanged*: each object has a tag (ETag), which changes when other content is put.

Listings are never kept: another process may have put objects a moment ago.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from distmm.errors import InputError

__all__ = ["ObjectFolder", "is_url", "located", "tag_of", "within"]

# The packages that know a put which fails where the object exists, by the scheme of a URL.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}


def is_url(path: str) -> bool:
    """Whether a name is a URL."""
    return "://" in path


def located(url: str) -> str:
    """Return the URL of an output, with no slash at its end.

    Raises
    ------
    InputError
        For a store that outputs cannot go to, whose package is missing, or that does not answer, and for a name that
        is no Zarr array's.
    """
    scheme, rest = url.split("://", 1)
    if scheme.lower() not in PACKAGES:
        raise InputError(
            f"{url}: outputs go to local or mounted folders, and to object stores ({', '.join(PACKAGES)}), which know "
            f"a put that fails where the object exists; write C there, or to a folder, and copy it"
        )
    parts = [part for part in rest.split("/") if part]
    if len(parts) < 2:
        raise InputError(f"{url}: names a bucket, and no array in it; write {url.rstrip('/')}/C.zarr")
    if set(rest) & set("*?[]"):
        raise InputError(f"{url}: has a character that fsspec takes for a pattern (*, ?, [ or ]); choose another name")
    suffix = os.path.splitext(parts[-1])[1].lower()
    if suffix not in ("", ".zarr") and not any(part.endswith(".zarr") for part in parts[1:-1]):
        raise InputError(f"{url}: an object store takes Zarr arrays only, as {url.removesuffix(suffix)}.zarr")
    place = f"{scheme.lower()}://{'/'.join(parts)}"
    try:
        fsspec.get_filesystem_class(scheme.lower())
    except ImportError as error:
        package = PACKAGES[scheme.lower()]
        raise InputError(f"{url}: needs {package} here and on the workers: pip install {package}") from error
    try:
        ObjectFolder(place).names()
    except OSError as error:
        raise InputError(
            f"{place}: cannot be reached: {error.strerror}; are endpoint, region and keys right?"
        ) from error
    return place


def within(url: str, other: str) -> bool:
    """Whether a URL is the same as another one, or lies in it; ``s3a`` counts as ``s3``, for example."""
    (scheme, inside), (scheme_of_other, outside) = (one.split("://", 1) for one in (url, other))
    parts, above = ([part for part in rest.split("/") if part] for rest in (inside, outside))
    same = PACKAGES.get(scheme.lower(), scheme) == PACKAGES.get(scheme_of_other.lower(), scheme_of_other)
    return same and parts[: len(above)] == above


class ObjectFolder:
    """The objects whose names begin with a URL and a slash; names are given relative to it.

    Parameters
    ----------
    url : str

    Errors of the store are `OSError` with number and name, whatever its package raises.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with self._explained(""):
            # Without a cache of listings. fsspec gives each call of a process the same object, with its connections.
            self._store, self._key = fsspec.url_to_fs(self.url, use_listings_cache=False)

    def read(self, name: str) -> bytes:
        """Return an object."""
        with self._explained(name):
            content: bytes = self._store.cat_file(self._at(name), start=0)  # else s3fs asks for the size first
            return content

    def read_all(self, names: Iterable[str]) -> dict[str, bytes | Exception]:
        """Return many objects, read at the same time; in place of one that cannot be read, the error."""
        at = {self._at(name): name for name in names}
        with self._explained(""):
            found = self._store.cat(list(at), on_error="return", start=0) if at else {}
        if isinstance(found, bytes):  # of one name
            return dict.fromkeys(at.values(), found)
        return {at[key]: content for key, content in found.items()}

    def put(self, name: str, content: bytes) -> None:
        """Put an object, which replaces another one of this name."""
        self._put(name, content, "overwrite")

    def create(self, name: str, content: bytes) -> None:
        """Put an object; raise FileExistsError if there is one."""
        self._put(name, content, "create")

    def facts(self, name: str) -> dict[str, Any] | None:
        """Return what the store says of an object; None if it is not there."""
        try:
            with self._explained(name):
                facts: dict[str, Any] = self._store.info(self._at(name))
        except FileNotFoundError:
            return None
        return facts if facts["type"] == "file" else None

    def tag(self, name: str) -> str:
        """Return the tag of an object."""
        facts = self.facts(name)
        if facts is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.url}/{name}")
        return tag_of(facts)

    def modified(self, name: str) -> float:
        """Return when an object was put, by the store's clock; 0 if it is not there."""
        try:
            with self._explained(name):
                return float(self._store.modified(self._at(name)).timestamp())
        except FileNotFoundError:
            return 0.0

    def names(self) -> list[str]:
        """Return the first parts of all names, each once."""
        self._store.invalidate_cache()
        try:
            with self._explained(""):
                found = self._store.ls(self._key, detail=False)
        except FileNotFoundError:
            return []
        names = {self._inside(name).split("/", 1)[0] for name in found}
        return sorted(names - {""})

    def everything(self) -> dict[str, dict[str, Any]]:
        """Return all objects by their names, with what the store says of them."""
        self._store.invalidate_cache()
        try:
            with self._explained(""):
                found = self._store.find(self._key, detail=True)
        except FileNotFoundError:
            return {}
        return {self._inside(name): facts for name, facts in found.items() if self._inside(name)}

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, many with one request; names without an object are ignored."""
        keys = [self._at(name) for name in names]
        if keys:
            with self._explained(""):
                try:
                    self._store.rm(keys)
                except FileNotFoundError:  # another one has removed it meanwhile
                    for key in keys:
                        if self._store.exists(key):
                            self._store.rm_file(key)

    def _put(self, name: str, content: bytes, mode: str) -> None:
        try:
            with self._explained(name):
                self._store.pipe_file(self._at(name), content, mode=mode)
        except FileNotFoundError:
            bucket = self._key.split("/", 1)[0]
            raise InputError(f"{self.url}: there is no bucket (or container) {bucket}; make it first") from None

    def _at(self, name: str) -> str:
        return f"{self._key}/{name}" if name else self._key

    def _inside(self, key: str) -> str:
        return key.removeprefix(self._key).strip("/") if key.startswith(f"{self._key}/") else ""

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Raise OSError with number and name for what the packages raise.

        The packages' errors appear in the text only: Dask would pickle them together with what they hold.
        """
        path = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except FileNotFoundError:
            explained: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        except FileExistsError:
            explained = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        except PermissionError as error:
            explained = PermissionError(errno.EACCES, f"the store refuses access: {_short(error)}", path)
        except Exception as error:  # of the network, the keys or the configuration: each package has kinds of its own
            explained = OSError(errno.EIO, f"the store does not answer as it should: {_short(error)}", path)
        else:
            return
        try:
            raise explained from None
        finally:
            explained.__context__ = None


def tag_of(facts: dict[str, Any]) -> str:
    """Return the tag among the facts of an object."""
    return str(facts.get("ETag") or facts["etag"]).strip('"')


def _short(error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error))[:300]
    return f"{type(error).__name__}: {text}"
