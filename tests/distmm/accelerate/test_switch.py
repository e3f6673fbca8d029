"""`accelerate` and `accelerated` turn on and off in any order of calls, and are functions in any order of imports."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest

import distmm
from distmm.accelerate import dask_names
from distmm.accelerate.__main__ import main
from distmm.errors import InputError
from tests.tables import later

ROOT = Path(__file__).resolve().parents[3]


def is_on() -> bool:
    on = {da.matmul is not dask_names.ORIGINALS["matmul"], da.linalg.tsqr is not dask_names.ORIGINALS["tsqr"]}
    assert len(on) == 1
    return on.pop()


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    assert not is_on()
    yield
    distmm.accelerate(False)
    assert not is_on()


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_called_twice_it_is_undone_by_one_call() -> None:
    distmm.accelerate()
    distmm.accelerate()
    assert is_on()
    distmm.accelerate(False)
    assert not is_on()
    distmm.accelerate(False)


def test_a_with_block_ends_what_it_began_and_no_more() -> None:
    with distmm.accelerated():
        with distmm.accelerated():
            assert is_on()
        assert is_on()
    assert not is_on()
    distmm.accelerate()
    with distmm.accelerated():
        pass
    assert is_on()


def test_a_with_block_ends_with_an_error() -> None:
    with pytest.raises(KeyError), distmm.accelerated():
        raise KeyError
    assert not is_on()


def test_with_blocks_of_threads_hold_until_the_last_has_ended() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with distmm.accelerated():
            entered.set()
            assert leave.wait(120)

    thread = threading.Thread(target=other)
    with distmm.accelerated():
        thread.start()
        assert entered.wait(120)
    assert is_on()
    leave.set()
    thread.join()
    assert not is_on()


def test_what_another_program_has_put_there_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    others = object()
    with monkeypatch.context() as patch:
        patch.setattr(da, "matmul", others)
        distmm.accelerate(False)
        assert da.matmul is others
        with distmm.accelerated():
            assert da.matmul is not others
        assert da.matmul is others


def test_what_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(InputError, match="on is 'off': give True, or False"):
        distmm.accelerate("off")  # type: ignore[arg-type]


ORDERS = {
    "distmm first": "import distmm",
    "the module by its path": "import distmm.accelerate",
    "a module below first": "import distmm.accelerate.functions; import distmm",
}


@pytest.mark.parametrize("order", later(ORDERS))
def test_the_name_is_the_function_after_any_imports(order: str) -> None:
    check = "from distmm.accelerate import accelerate; import distmm.accelerate; assert distmm.accelerate is accelerate"
    done = python("-c", f"{ORDERS[order]}; {check}; accelerate(); accelerate(False)")
    assert done.returncode == 0, done.stderr


@pytest.mark.minutes
def test_a_script_runs_with_it_with_its_own_arguments_and_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("EDGE = 600\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport dask.array as da\nfrom neighbour import EDGE\n"
        "A = da.ones((EDGE, EDGE), chunks=200)\n"
        "print(__name__, sys.argv[1:], (A @ A).name.partition('-')[0], float((A @ A).sum().compute()))\n"
    )
    done = python("-W", "error::RuntimeWarning", "-m", "distmm.accelerate", str(script), "--rows", "3")
    assert done.stderr == ""
    assert done.stdout.split("\n")[0] == f"__main__ ['--rows', '3'] distmm {600.0**3}"


def test_a_script_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    usage = "usage: python -m distmm.accelerate script.py"
    monkeypatch.setattr(sys, "argv", ["accelerate", "nowhere.py"])
    with pytest.raises(SystemExit, match=f"nowhere.py is no file; {usage}"):
        main()
    monkeypatch.setattr(sys, "argv", ["accelerate"])
    main()
    assert capsys.readouterr().out.startswith(usage)


@pytest.mark.minutes
def test_query_planning_is_refused_with_the_setting_and_the_remedy() -> None:
    done = python("-c", "import distmm; distmm.accelerate()", DASK_ARRAY__QUERY_PLANNING="True")
    assert "InputError" in done.stderr
    assert "array.query-planning: True" in done.stderr
    assert "DASK_ARRAY__QUERY_PLANNING=False" in done.stderr


def test_arrays_made_with_it_on_are_computed_after_it_is_off() -> None:
    A = da.from_array(np.arange(12.0).reshape(6, 2), chunks=2)
    with dask.config.set({"distmm.accelerate.min-flops": 0}), distmm.accelerated():
        C = A @ A.T
    assert C.name.startswith("distmm-matmul")
    np.testing.assert_array_equal(C.compute(), A.compute() @ A.compute().T)
