"""The usual kernels of a type, built by other processes while a first product begins: when, which, and how often."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from distmm_kernels import ahead, background
from distmm_kernels.device import Device
from distmm_kernels.emulation import splits
from distmm_kernels.emulation.formats import FP16_PAIR
from distmm_kernels.launch import hopper_launch
from distmm_kernels.launch.binary import Recipe, is_kept
from distmm_kernels.layout.stack import Stack

H100 = 9, 0


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Return the processes that `begin` has started: their last arguments."""
    monkeypatch.delenv("DISTMM_BUILD_AHEAD")
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path))
    commands: list[str] = []

    def start(command, **how):
        commands.append(command[-1])
        if "float64" in command[-1]:
            raise OSError("no memory for a process")
        return SimpleNamespace(wait=lambda: 0, poll=lambda: 0 if "int8" in command[-1] else None)

    monkeypatch.setattr(background.subprocess, "Popen", start)
    monkeypatch.setattr(background, "is_kept", lambda *_: False)
    background._start.cache_clear()
    yield commands
    background._start.cache_clear()


@pytest.fixture
def built(monkeypatch, tmp_path):
    """Let `build` build nothing; return for what it is asked."""
    asked = []
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setattr(ahead, "preloaded", lambda: None)
    monkeypatch.setattr(background.os, "nice", lambda more: more)
    monkeypatch.setattr(background.os, "sched_setscheduler", lambda *how: None)
    monkeypatch.setattr(
        ahead, "build", lambda capability, dtypes, processes: iter([asked.append((capability, dtypes))] * 2)
    )
    return asked


def test_a_cache_folder_of_another_user_is_no_error(started, monkeypatch):
    def hidden(path, **how):
        raise PermissionError(f"{path} is another user's")

    monkeypatch.setattr(background.Path, "stat", hidden)
    background.begin("float32", H100)
    assert len(started) == 1


def test_a_process_asks_once_for_each_type(started):
    for _ in range(2):
        background.begin("float32", H100)
        background.begin("float64", H100)
    assert len(started) == 2
    assert "float32" in started[0]


def test_kernels_are_being_built_until_the_usual_ones_are_there_or_nobody_builds(started, monkeypatch):
    there: set[Recipe] = set()
    monkeypatch.setattr(background, "is_kept", lambda recipe, capability: recipe in there)
    for recipe in ahead.usual(H100, "float32"):
        assert background.begin("float32", H100)
        there.add(recipe)
    assert not background.begin("float32", H100)
    there.clear()
    assert not background.begin("float32", H100), "it does not look again"
    for dtype in ("float64", "float8_e4m3fn"):  # its process cannot start; it has none
        assert not background.begin(dtype, H100)
    assert not background.begin("float32", None)


def test_kernels_are_being_built_while_another_process_builds_them_and_no_longer(started):
    with open(background._mark("int8", H100), "w") as mark:  # so the process of this one has ended
        fcntl.flock(mark, fcntl.LOCK_EX)
        assert background.begin("int8", H100)
    assert not background.begin("int8", H100)
    with open(background._mark("int8", H100), "w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        assert not background.begin("int8", H100), "no further call looks at a file"


def test_products_compile_their_kernels_where_the_build_takes_too_long(started, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(background.time, "monotonic", lambda: now)
    assert background.begin("float32", H100)
    now += background.PATIENCE + 1
    assert not background.begin("float32", H100)


def test_a_call_during_a_build_looks_for_the_kernel_that_is_built_last(started, monkeypatch):
    asked: list[Recipe] = []
    monkeypatch.setattr(background, "is_kept", lambda recipe, capability: bool(asked.append(recipe)))
    assert background.begin("float32", H100)
    assert asked == ahead.usual(H100, "float32")[-1:]


def test_the_usual_kernels_are_built_first():
    for dtype in ahead.TYPES:
        usual = ahead.usual(H100, dtype)
        assert usual == ahead.recipes(H100, dtype)[: len(usual)]


def test_threads_that_begin_at_once_start_one_process(started, monkeypatch):
    inside = threading.Barrier(8)
    monkeypatch.setattr(background, "_is_built", lambda mark: time.sleep(0.01) or False)

    def first(_):
        inside.wait()
        background.begin("float32", H100)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(first, range(8)))
    assert len(started) == 1


def test_nothing_is_started_for_kernels_that_are_built_or_never_built_ahead(started, monkeypatch, tmp_path):
    background._mark("float32", H100).write_text("built")
    background.begin("float32", H100)
    background.begin("float8_e4m3fn", H100)
    background.begin("int8", (7, 5))
    monkeypatch.setenv("DISTMM_BUILD_AHEAD", "0")
    background.begin("int8", H100)
    assert not started


def test_nothing_is_started_for_a_gpu_whose_usual_kernels_are_in_a_folder(started, monkeypatch):
    monkeypatch.setattr(background, "is_kept", lambda recipe, capability: capability == H100)
    monkeypatch.setenv("DISTMM_KERNELS_DIR", "image")
    assert not background.begin("float32", H100)
    assert not started
    assert background.begin("float32", (8, 0)), "the folder has no kernels for this GPU"
    assert len(started) == 1


def test_kernels_are_looked_for_in_the_cache_and_in_the_folder_that_is_only_read(monkeypatch, tmp_path):
    recipe = Recipe("maker", ("parameter",))
    monkeypatch.setattr(Recipe, "key", lambda self, capability: f"{self.maker}-{capability}")  # without a compiler
    for variable in ("DISTMM_CACHE_DIR", "DISTMM_KERNELS_DIR"):
        assert not is_kept(recipe, H100)
        monkeypatch.setenv(variable, str(tmp_path / variable))
        (tmp_path / variable).mkdir()
        file = tmp_path / variable / f"{recipe.key(H100)}.kernel"
        file.touch()
        assert is_kept(recipe, H100)
        file.unlink()


def test_kernels_that_are_built_are_marked(built):
    background.build("float32", (8, 9))
    assert built == [((8, 9), ["float32"])]
    assert background._is_built(background._mark("float32", (8, 9)))
    assert not background._is_built(background._mark("float32", H100))
    background.build("float32", (8, 9))
    assert len(built) == 1


@pytest.mark.parametrize("forbidden", [None, PermissionError, OSError])
def test_builders_give_way_to_other_programs(built, monkeypatch, forbidden):
    asked = []

    def schedule(process, policy, parameters):
        asked.append(policy)
        if forbidden:
            raise forbidden("no other class")

    monkeypatch.setattr(background.os, "nice", asked.append)
    monkeypatch.setattr(background.os, "sched_setscheduler", schedule)
    background.build("float32", H100)
    assert asked == [19, background.os.SCHED_IDLE]
    assert background._is_built(background._mark("float32", H100))


def test_a_second_process_builds_nothing_meanwhile(built):
    mark = background._mark("float32", H100)
    mark.parent.mkdir()
    with open(mark, "w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        background.build("float32", H100)
    assert not built
    assert not background._is_built(mark)


def test_another_type_waits_for_its_turn(built):
    mark = background._mark("float32", H100)
    mark.parent.mkdir()
    with ThreadPoolExecutor(1) as pool, open(mark.with_name("building"), "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        building = pool.submit(background.build, "float32", H100)
        with pytest.raises(TimeoutError):
            building.result(0.2)
        assert not built
        fcntl.flock(other, fcntl.LOCK_UN)
        building.result(60)
    assert background._is_built(mark)


def test_the_build_ends_with_the_process_that_started_it(built, monkeypatch):
    parents = iter([41, 41, 1])
    monkeypatch.setattr(background.os, "getppid", lambda: next(parents))
    background.build("float32", H100)
    assert next(parents, None) is None
    assert not background._is_built(background._mark("float32", H100))


def test_the_process_that_is_started_does_what_build_does(monkeypatch, tmp_path):
    monkeypatch.delenv("DISTMM_BUILD_AHEAD")
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(
        "from distmm_kernels import ahead\nahead.build = lambda *asked: iter([print(asked)])\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    processes, popen = [], subprocess.Popen

    def start(command, **how):
        processes.append(popen(command, **how))
        return processes[-1]

    monkeypatch.setattr(background.subprocess, "Popen", start)
    monkeypatch.setattr(background, "is_kept", lambda *_: False)
    background._start.cache_clear()
    with contextlib.ExitStack() as stack:
        stack.callback(background._start.cache_clear)
        background.begin("int8", H100)
        assert processes[0].wait(120) == 0
    assert background._is_built(background._mark("int8", H100))


def test_the_kernels_of_a_first_product_are_built_first(monkeypatch):
    launched = set()

    def stack(*shape, turned=False):
        rows, columns = shape
        pitches = (4, 4 * rows) if turned else (4 * columns, 4)
        return Stack(256, (1, *shape), (4 * rows * columns, *pitches), 4)

    for module in (splits, hopper_launch):
        monkeypatch.setattr(module, "loaded", lambda recipe, device: launched.add(recipe))
    gpu = Device("cuda", "NVIDIA H200", 0, 0, (9, 0), 132)
    for operand in (stack(8192, 512), stack(1, 8192), stack(8192, 512, turned=True)):
        splits.Splitter(FP16_PAIR, gpu)._plan(operand)
    hopper_launch.hopper_gemm.cache_clear()
    gemms = hopper_launch.HopperGemms(gpu)
    layout = {"operand": "float16", "a_major": "k", "b_major": "n"}
    for edge in (4096, 8192):
        for adds in (False, True):
            gemms(stack(edge, edge), "float32", **layout, products=3, scaled=True, adds=adds, symmetric=0)
    hopper_launch.hopper_gemm.cache_clear()
    launched.add(Recipe(f"{ahead.CODE}thin_products:times_vectors", ("float32",)))
    assert launched <= set(ahead.recipes((9, 0), "float32")[:20])
