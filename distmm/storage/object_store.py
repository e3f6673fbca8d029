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
import uuid
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


# URLs of files of this machine. As for fsspec, %20 is no space, and a relative path may follow the slashes.
LOCAL = re.compile(r"^(?:file|local)://(?:localhost(?=/))?", re.IGNORECASE)


def is_url(path: str) -> bool:
    """Whether a name is a URL of a store. That of a local file, ``file:///data/A.npy``, is another name of its path."""
    return "://" in path and LOCAL.match(path) is None


def without_scheme(path: str) -> str:
    """Return the path that a URL of a local file has. Other names are returned unchanged."""
    return LOCAL.sub("", path)


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
        raise InputError(f"{url}: is a bucket without an array's name; write {scheme}://{(*parts, 'bucket')[0]}/C.zarr")
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
        OBJECTS.read(f"{url.rstrip('/')}/zarr.json")
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


class Objects:
    """The objects of S3, Google Cloud Storage or Azure, by their URLs. A folder is a prefix of names.

    All errors of a store are raised as `OSError` with an error number and a URL. The class also has the methods and the
    guarantees of `distmm.storage.records.Disk`.
    """

    def exists(self, url: str) -> bool:
        """Whether there is an object of this name, and not only a folder."""
        return _asked(url, lambda store, key: store.info(key)["type"] == "file", False)

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects and folders directly in a folder."""
        return sorted(
            {name.split("/", 1)[0] for name in _listed(folder, lambda store, key: store.ls(key, detail=False))}
        )

    def everything(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return the names of all objects of a folder, at any depth, with the store's facts of each."""
        return _listed(folder, lambda store, key: store.find(key, detail=True))

    def read(self, url: str) -> bytes:
        """Return the contents of an object."""
        with _opened(url) as (store, key):
            return store.cat_file(key, start=0)  # without `start`, s3fs first gets the size

    def read_all(self, folder: str) -> Iterator[tuple[str, bytes | Exception]]:
        """Read all objects of a folder concurrently. Yield each name with its contents, or the error of the read."""
        names = self.names(folder)
        with _opened(folder) as (store, key):
            found = store.cat([f"{key}/{name}" for name in names], on_error="return", start=0) if names else {}
        # fsspec returns the contents alone for a single name.
        contents = [found] if isinstance(found, bytes) else [found[f"{key}/{name}"] for name in names]
        yield from zip(names, contents, strict=True)

    def put(self, url: str, content: bytes, is_new: bool = False) -> None:
        """Put an object. If an object of this name exists, replace it, or raise FileExistsError if the one `is_new`."""
        try:
            with _opened(url) as (store, key):
                store.pipe_file(key, content, mode="create" if is_new else "overwrite")
        except FileNotFoundError:
            bucket = key.split("/", 1)[0]
            raise InputError(f"{url}: there is no bucket (or container) {bucket}; create it first") from None

    def write(self, path: str, content: bytes, drafts: str | None = None) -> None:
        """Put a record."""
        self.put(path, content)

    def create(self, path: str, content: bytes) -> None:
        """Write a new record.

        Some stores accept the condition of a put, but ignore it. So a second put is made, which has to fail.
        """
        try:
            self.put(path, content, is_new=True)
        except FileExistsError:
            # If the response to a put is lost, the package sends the put again. The content identifies the owner.
            if self.read(path) != content:
                raise
        try:
            self.put(path, b"", is_new=True)
        except FileExistsError:
            return
        self.remove(path)
        raise InputError(
            f"{path}: this store replaces an object although the request forbids it (If-None-Match: *), so two jobs "
            f"could write the same C; use a store that supports this condition, or write C to a folder"
        )

    def tag(self, url: str) -> str:
        """Return the tag of an object."""
        with _opened(url) as (store, key):
            return tag_of(store.info(key))

    def touch(self, path: str) -> None:
        """Show that the owner of a record is alive."""
        # Not the record itself: a suspended owner could put back a record that was removed in the meantime.
        self.put(f"{path}.beat", b"")

    def age(self, path: str) -> float:
        """Return the seconds since a record was put or touched, by the store's clock."""
        written = _put_at(path)
        if not written:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        probe = f"{os.path.dirname(path)}/clock.{uuid.uuid4().hex}"
        self.put(probe, b"")
        try:
            return _put_at(probe) - max(written, _put_at(f"{path}.beat"))
        finally:
            self.remove(probe)

    def remove_all(self, folder: str, names: Iterable[str]) -> None:
        """Remove objects of a folder, many with one request. Names without an object are ignored."""
        names = list(names)
        with _opened(folder) as (store, key):
            keys = [f"{key}/{name}" for name in names]
            try:
                if keys:
                    store.rm(keys)
            except FileNotFoundError:  # another process has removed one in the meantime
                for one in filter(store.exists, keys):
                    store.rm_file(one)

    def remove(self, path: str) -> None:
        """Remove a record."""
        folder, name = os.path.split(path)
        self.remove_all(folder, [name, f"{name}.beat"])

    def discard(self, path: str, owner: str) -> None:
        """Remove a record, or a whole folder."""
        self.remove_all(path, self.everything(path))
        self.remove(path)

    def own(self, folder: str, token: str) -> str:
        """Return the name of the folder that an owner would have on a disk."""
        return f"{folder}/{token}"

    def _nothing(self, *folders: str) -> None:
        """Do nothing: folders are parts of names, and an object is durable when its put has returned."""

    take_over = sync = make_folder = remove_folder = _nothing


OBJECTS = Objects()


@contextmanager
def _opened(url: str) -> Iterator[tuple[Any, str]]:
    """Yield a store, and the key of a URL in it. Any error of the store's package becomes an OSError with the URL.

    The package's error appears only in the text. Otherwise Dask would pickle it with all objects that it refers to.
    """
    import fsspec

    url = url.rstrip("/")
    try:
        # fsspec returns the same store, with its open connections, for all calls in a process.
        yield fsspec.url_to_fs(url, use_listings_cache=False)
        return
    except Exception as error:  # each package has its own types of errors of network, keys and configuration
        code = next((code for kind, code in CODES.items() if isinstance(error, kind)), errno.EIO)
        what = f"{TROUBLE[code]}: {_short(error)}" if code in TROUBLE else os.strerror(code)
    explained = OSError(code, what, url)  # Python chooses the class by the code
    try:
        raise explained from None
    finally:
        explained.__context__ = None


def _asked(url: str, ask: Callable[[Any, str], T], absent: T) -> T:
    """Return what a store says of an object or folder, or `absent` if it does not exist."""
    try:
        with _opened(url) as (store, key):
            return ask(store, key)
    except FileNotFoundError:
        return absent


def _listed(folder: str, ask: Callable[[Any, str], Iterable[str]]) -> dict[str, Any]:
    """Return what a store lists of a folder, by the names inside the folder."""

    def listed(store: Any, key: str) -> dict[str, Any]:
        store.invalidate_cache()
        found = ask(store, key)
        facts = found if isinstance(found, dict) else dict.fromkeys(found)
        inside = {name[len(key) :].strip("/"): each for name, each in facts.items() if name.startswith(f"{key}/")}
        return {name: each for name, each in inside.items() if name}

    return _asked(folder, listed, {})


def _put_at(url: str) -> float:
    """Return the time of an object's put in seconds, by the store's clock. 0 if it does not exist."""
    return _asked(url, lambda store, key: float(store.modified(key).timestamp()), 0.0)


def tag_of(facts: dict[str, Any]) -> str:
    """Return the tag among the facts of an object."""
    return str(facts.get("ETag") or facts["etag"]).strip('"')


def _short(error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error))[:300]
    return f"{type(error).__name__}: {text}"
