"""The cache of compiled kernels on disk, without a compiler."""

from __future__ import annotations

import builtins
import concurrent.futures
import errno
import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import distmm_kernels
from distmm_kernels.launch import binary as module
from distmm_kernels.launch import cache, compiler
from distmm_kernels.launch.binary import Recipe, binary, cache_folder, is_kept

HOPPER = (9, 0)


@dataclass(frozen=True)
class Size:
    rows: int


def maker(*parameters):
    return parameters


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """What the compiler was asked for; it answers with something that no two calls share."""
    asked, counter = [], itertools.count()

    def build(source, compute_capability):
        asked.append((source, compute_capability))
        return compiler.Binary(b"\n\0cubin %d" % next(counter), 128, 50_000, "log\nof two lines")

    monkeypatch.setattr(compiler, "build", build)
    monkeypatch.setattr(compiler, "versions", lambda: "numba-cuda 0.30")
    monkeypatch.setattr(module.importlib, "import_module", lambda name: __import__("types").SimpleNamespace(make=maker))
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path / "cache"))
    return asked


def recipe(*parameters):
    return Recipe("some.module:make", parameters)


def test_a_kernel_is_compiled_once_and_then_found_on_disk(builds):
    first = binary(recipe(1, Size(2)), HOPPER)
    assert binary(recipe(1, Size(2)), HOPPER) == first
    assert builds == [((1, Size(2)), HOPPER)]


def test_whatever_the_code_depends_on_changes_the_key(builds, monkeypatch):
    def key():
        return recipe(Size(1)).key(HOPPER)

    keys = [key(), recipe(Size(2)).key(HOPPER), recipe(Size(1)).key((8, 0)), Recipe("a:b", (Size(1),)).key(HOPPER)]
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "versions", lambda: "numba-cuda 0.31")
        keys.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(cache, "sources", lambda: "one character more")
        keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_the_key_covers_the_whole_package(monkeypatch):
    read = []

    def read_bytes(path):
        read.append(path.relative_to(Path(distmm_kernels.__file__).parent).as_posix())
        return b""

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    cache._digest()
    assert {"config.py", "tiles/tiling.py", "device_code/emit.py", "device_code/hopper/ring.py"} <= set(read)


def test_the_key_is_that_of_the_import_and_an_upgrade_under_the_process_keeps_nothing(tmp_path):
    """Kernels of the old code must not stand under the key of the new code, nor those of new modules under the old."""
    folder = tmp_path / "distmm_kernels"
    shutil.copytree(Path(distmm_kernels.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    program = """
import sys, warnings, distmm_kernels
from pathlib import Path
(Path(distmm_kernels.__file__).parent / "config.py").write_text("upgraded")
from distmm_kernels.launch import cache
kept = Path(sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cache.write(kept, b"old code", "a compiled kernel")
assert not kept.exists() and "Start the process again" in str(caught[0].message)
print(cache.sources())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "kept"], cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert ran.stdout.strip() == cache.sources(), ran.stderr


def test_a_damaged_file_in_a_read_only_folder_is_compiled_in_each_process(builds, monkeypatch):
    """On a read-only file system even a file that is not there cannot be removed."""
    binary(recipe(), HOPPER)
    (path,) = cache_folder().iterdir()
    path.write_bytes(b"short")

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for where, name in ((builtins, "open"), (os, "utime"), (os, "replace"), (Path, "unlink")):
        monkeypatch.setattr(where, name, refused)
    with pytest.warns(RuntimeWarning, match="compiled kernels cannot be kept"):
        made = binary(recipe(), HOPPER)
    assert made.threads == 128
    assert len(builds) == 2


def test_the_folder_keeps_the_kernels_that_were_used_last(builds, monkeypatch):
    monkeypatch.setattr(module, "MOST_FILES", 3)
    for number in range(3):
        binary(recipe(number), HOPPER)
        os.utime(cache_folder() / f"{recipe(number).key(HOPPER)}.kernel", (number, number))
    measured = cache_folder() / "rates.json"
    measured.write_text("of another kind")
    binary(recipe(0), HOPPER)  # read: now the newest
    binary(recipe(3), HOPPER)
    kept = {path.stem for path in cache_folder().glob("*.kernel")}
    assert kept == {recipe(number).key(HOPPER) for number in (0, 2, 3)}
    assert measured.exists()


@pytest.mark.parametrize("damage", [b"", b"short", None, -1, 0])
def test_a_damaged_file_is_compiled_again(builds, damage):
    binary(recipe(), HOPPER)
    (path,) = cache_folder().iterdir()
    content = path.read_bytes()
    if isinstance(damage, int):  # one bit
        content = bytearray(content)
        content[damage] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(content[: len(content) // 2] if damage is None else damage)
    again = binary(recipe(), HOPPER)
    assert len(builds) == 2
    assert binary(recipe(), HOPPER) == again
    assert len(builds) == 2


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_result(builds, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(file))
    with pytest.warns(RuntimeWarning, match="DISTMM_CACHE_DIR"):
        assert binary(recipe(), HOPPER).threads == 128


def test_a_folder_of_another_user_has_no_kernels(builds, monkeypatch):
    binary(recipe(), HOPPER)
    assert is_kept(recipe(), HOPPER)

    def hidden(path, **how):
        raise PermissionError(f"{path} is another user's")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", hidden)
        found = is_kept(recipe(), HOPPER)
    assert not found


def test_of_many_that_need_a_kernel_one_compiles_it(builds):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: binary(recipe(), HOPPER), range(40)))
    assert len(builds) == 1
    (path,) = cache_folder().iterdir()
    assert set(made) == {module._read(path)}


def test_a_stopped_process_that_compiles_a_kernel_holds_up_others_for_a_while_only(builds, monkeypatch):
    monkeypatch.setattr(cache, "PATIENCE", 0.1)
    with cache.alone(cache_folder() / f"{recipe().key(HOPPER)}.kernel"):
        assert binary(recipe(), HOPPER).threads == 128
    assert len(builds) == 1


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("DISTMM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "distmm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "distmm"
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_users_who_share_the_folder_may_read_each_others_kernels_as_far_as_their_umask_allows(builds, umask):
    before = os.umask(umask)
    try:
        binary(recipe(), HOPPER)
    finally:
        os.umask(before)
    (path,) = cache_folder().iterdir()
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_only_kernels_with_instructions_of_one_architecture_are_built_for_it_alone(monkeypatch):
    targets = []

    def compiled(function, signature, target, threads, blocks):
        targets.append(target)
        return b""

    monkeypatch.setattr("distmm_kernels.device_code.emit.compile_to_ltoir", compiled)
    monkeypatch.setattr(compiler, "_link", lambda code, name, target: (targets.append(target) or b"", ""))
    for specific in (False, True):
        compiler.build(compiler.Source(maker, None, 128, specific=specific), (12, 0))
    assert targets == [(12, 0), "sm_120", (12, 0, "a"), "sm_120a"]
    assert compiler.architecture((8, 9)) == "sm_89"
