"""Object stores for inputs and outputs: S3, Google Cloud Storage and Azure, through fsspec.

Object stores replace the guarantees of a file system as follows:

- *fsync*: an object is complete and durable when its put has returned.
- *Exclusive creation* (``O_EXCL``): a conditional put fails if the object exists (``If-None-Match: *`` in S3 and Azure,
  ``ifGenerationMatch=0`` in Google's store). All three packages call it ``mode="create"``.
- *Rename*: stores have none. An array appears when its last object is put (`distmm.storage.zarr_objects`).
- *Unchanged contents*: each object has a tag (ETag), which changes when other contents are put.

Listings are never cached, because other processes put objects, too.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from distmm.errors import InputError

T = TypeVar("T")

# fsspec's packages that support conditional puts, by the scheme of a URL.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}

# Errors of a store: the error number by the type, and what is said of those that need an explanation.
CODES = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST, PermissionError: errno.EACCES}
TROUBLE = {errno.EACCES: "the store refuses access", errno.EIO: "the store does not answer as it should"}


def is_url(path: str) -> bool:
    """Whether a name is a URL."""
    return "://" in path


def located(url: str) -> str:
    """Return the URL of an output, without a slash at its end.

    Raises
    ------
    InputError
        For a store without conditional puts, a store whose package is missing or that does not answer, and a name that
        is not suitable for a Zarr array.
    """
    scheme, rest = url.split("://", 1)
    if scheme.lower() not in PACKAGES:
        raise InputError(
            f"{url}: distmm writes to local or mounted folders, and to object stores with conditional puts "
            f"({', '.join(PACKAGES)}); write C to one of these, and copy it"
        )
    parts = [part for part in rest.split("/") if part]
    if len(parts) < 2:
        raise InputError(f"{url}: is a bucket without the name of an array; write {url.rstrip('/')}/C.zarr")
    if set(rest) & set("*?[]"):
        raise InputError(f"{url}: has a character that fsspec reads as a pattern (*, ?, [ or ]); choose another name")
    suffix = os.path.splitext(parts[-1])[1].lower()
    if suffix not in ("", ".zarr") and not any(part.endswith(".zarr") for part in parts[1:-1]):
        raise InputError(
            f"{url}: distmm writes only Zarr arrays to object stores; write {url.removesuffix(suffix)}.zarr"
        )
    place = f"{scheme.lower()}://{'/'.join(parts)}"
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme.lower())
    except ImportError as error:
        package = PACKAGES[scheme.lower()]
        raise InputError(f"{url}: needs {package} here and on the workers: pip install {package}") from error
    check_access(place)
    return place


def check_access(url: str) -> None:
    """Raise InputError if a store cannot be reached, or refuses access. It need not have an array at that URL."""
    try:
        ObjectFolder(url).read("zarr.json")
    except (FileNotFoundError, IsADirectoryError):
        return
    except OSError as error:
        raise InputError(
            f"{url}: cannot be reached: {error.strerror}; check its address and keys (for S3 also endpoint and region, "
            "in AWS_* variables of the environment, or FSSPEC_S3_ANON=true for public data)"
        ) from error


def within(url: str, other: str) -> bool:
    """Whether a URL is another URL, or is inside it. Schemes of one store are equal, for example ``s3a`` and ``s3``."""
    (scheme, inside), (scheme_of_other, outside) = (one.split("://", 1) for one in (url, other))
    parts, above = ([part for part in rest.split("/") if part] for rest in (inside, outside))
    same = PACKAGES.get(scheme.lower(), scheme) == PACKAGES.get(scheme_of_other.lower(), scheme_of_other)
    return same and parts[: len(above)] == above


class ObjectFolder:
    """The objects whose names begin with a URL and a slash; an empty name is the object of the URL itself.

    All errors of the store are raised as `OSError` with an error number and a name.

    Parameters
    ----------
    url : str
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        with self._explained(""):
            # fsspec returns the same object, with its open connections, for all calls in a process.
            self._store, self._key = fsspec.url_to_fs(self.url, use_listings_cache=False)

    def read(self, name: str = "") -> bytes:
        """Return the contents of an object."""
        with self._explained(name):
            return self._store.cat_file(self._at(name), start=0)  # without `start`, s3fs first gets the size

    def read_all(self, names: Iterable[str]) -> dict[str, bytes | Exception]:
        """Read many objects concurrently, and return their contents. An object that cannot be read has its error."""
        at = {self._at(name): name for name in names}
        with self._explained(""):
            found = self._store.cat(list(at), on_error="return", start=0) if at else {}
        if isinstance(found, bytes):  # fsspec's result for a single name
            return dict.fromkeys(at.values(), found)
        return {at[key]: content for key, content in found.items()}

    def put(self, name: str, content: bytes, is_new: bool = False) -> None:
        """Put an object. If an object of this name exists, replace it, or raise FileExistsError if the one `is_new`."""
        try:
            with self._explained(name):
                self._store.pipe_file(self._at(name), content, mode="create" if is_new else "overwrite")
        except FileNotFoundError:
            bucket = self._key.split("/", 1)[0]
            raise InputError(f"{self.url}: there is no bucket (or container) {bucket}; create it first") from None

    def exists(self, name: str = "") -> bool:
        """Whether there is an object of this name, and not only a folder."""
        return self._asked(name, lambda key: self._store.info(key)["type"] == "file", False)

    def tag(self, name: str) -> str:
        """Return the tag of an object."""
        with self._explained(name):
            return tag_of(self._store.info(self._at(name)))

    def modified(self, name: str = "") -> float:
        """Return the time of an object's put in seconds, by the store's clock. 0 if it does not exist."""
        return self._asked(name, lambda key: float(self._store.modified(key).timestamp()), 0.0)

    def names(self) -> list[str]:
        """Return the names of the objects and folders directly in this folder."""
        self._store.invalidate_cache()
        found: list[str] = self._asked("", lambda key: self._store.ls(key, detail=False), [])
        return sorted({self._inside(name).split("/", 1)[0] for name in found} - {""})

    def everything(self) -> dict[str, dict[str, Any]]:
        """Return the names of all objects, at any depth, with the store's facts of each."""
        self._store.invalidate_cache()
        found: dict[str, Any] = self._asked("", lambda key: self._store.find(key, detail=True), {})
        return {self._inside(name): facts for name, facts in found.items() if self._inside(name)}

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, many with one request. Names without an object are ignored."""
        keys = [self._at(name) for name in names]
        if keys:
            with self._explained(""):
                try:
                    self._store.rm(keys)
                except FileNotFoundError:  # another process has removed one in the meantime
                    for key in keys:
                        if self._store.exists(key):
                            self._store.rm_file(key)

    def _asked(self, name: str, ask: Callable[[str], T], absent: T) -> T:
        """Return what the store says of an object or folder, or `absent` if it does not exist."""
        try:
            with self._explained(name):
                return ask(self._at(name))
        except FileNotFoundError:
            return absent

    def _at(self, name: str) -> str:
        return f"{self._key}/{name}" if name else self._key

    def _inside(self, key: str) -> str:
        return key.removeprefix(self._key).strip("/") if key.startswith(f"{self._key}/") else ""

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Raise OSError, with an error number and the name, for any error of the store's package.

        The package's error appears only in the text. Otherwise Dask would pickle it with all objects that it refers to.
        """
        try:
            yield
            return
        except Exception as error:  # each package has its own types of errors of network, keys and configuration
            code = next((code for kind, code in CODES.items() if isinstance(error, kind)), errno.EIO)
            what = f"{TROUBLE[code]}: {_short(error)}" if code in TROUBLE else os.strerror(code)
        path = f"{self.url}/{name}" if name else self.url
        explained = OSError(code, what, path)  # Python chooses the class by the code
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
