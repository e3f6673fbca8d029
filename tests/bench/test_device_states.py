"""A few losses of power on real file systems; `tests/bench/device_states.py` makes hundreds."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import recorded_device
from tests.bench.recorded_device import DISCARD, FLUSH, HEADER, LOSSES, NEEDED, PAGE, SECTOR, Device, namespace

PROGRAM = Path(recorded_device.__file__).with_name("device_states.py")


def devices() -> None:
    """Skip where nothing may be mounted, and where programs are missing; where these ought to be there, fail."""
    for path in ("/dev/loop-control", "/dev/fuse"):
        if not os.access(path, os.R_OK | os.W_OK):
            pytest.skip(f"needs {path}, and root")
    tried = subprocess.run([*namespace(), "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"mounting is not permitted here: {tried.stderr.strip()}")
    try:
        for name in NEEDED:
            recorded_device.program(name)
    except FileNotFoundError as error:
        (pytest.fail if os.environ.get("DISTMM_CI") else pytest.skip)(str(error))


def lose_power(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    devices()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, PROGRAM, "--dir", tmp_path, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.minutes
@pytest.mark.timeout(1800)
def test_c_outlives_a_loss_of_power_on_each_file_system(tmp_path: Path) -> None:
    # xfs and btrfs write what is left after half a minute.
    done = lose_power(tmp_path, "--states", "1", "--after", "35")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "39 states, 39 right" in done.stdout, done.stdout
    assert not os.listdir(tmp_path)


@pytest.mark.minutes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("system", ["ext4", "xfs", "btrfs"])
def test_jobs_without_fsync_are_caught(system: str, tmp_path: Path) -> None:
    done = lose_power(tmp_path, "--unsynced", "--states", "8", "--after", "0", "--systems", system, "--kinds", "Zarr")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "GONE: the job had ended" in done.stdout


def record(device: Device, *requests: tuple[int, bytes, int]) -> None:
    """Write a record as QEMU does: where the pages begin, what they hold, and flags."""
    device.folder.mkdir()
    (device.folder / "base").write_bytes(b"-" * 8 * PAGE)
    content = bytes(SECTOR)
    for page, data, flags in requests:
        length = PAGE if flags & DISCARD else len(data)
        head = HEADER.pack(page * PAGE // SECTOR, length // SECTOR, flags, 0)
        content += head.ljust(SECTOR, b"\0") + data
    (device.folder / "record").write_bytes(content)


def pages(device: Device, point: int, loss: str, seed: int) -> str:
    """What a state holds: the first byte of each page, and that of all its bytes."""
    content = device.state(device.parts(point, loss, random.Random(seed))).read_bytes()
    held = [content[at : at + PAGE] for at in range(0, len(content), PAGE)]
    assert all(len(set(page)) == 1 for page in held)  # a page is written as a whole
    return "".join(chr(page[0]) for page in held)


@pytest.mark.skipif(shutil.which("cp") is None, reason="needs cp")
def test_what_was_flushed_stays_and_what_came_later_may_go(tmp_path: Path) -> None:
    device = Device(tmp_path / "device", "ext4")
    record(
        device, (0, b"a" * PAGE, 0), (1, b"b" * PAGE * 2, 0), (0, b"", FLUSH), (0, b"A" * PAGE, 0),
        (3, b"c" * PAGE * 3, 0), (1, b"", DISCARD),
    )  # fmt: skip
    assert pages(device, 2, "whole", 0) == "abb-----"
    assert pages(device, 3, "whole", 0) == "abb-----"
    assert pages(device, 6, "whole", 0) == "A\0bccc--"
    seen = {loss: {pages(device, 6, loss, seed) for seed in range(60)} for loss in LOSSES}
    assert seen["whole"] == {"A\0bccc--"}
    assert seen["lost"] == {one + two + "b" + three + "--" for one in "aA" for two in "b\0" for three in ("---", "ccc")}
    assert {state[3:6] for state in seen["torn"]} >= {"c--", "--c", "c-c", "ccc", "---"}
    assert all(state[2] == "b" and state[6:] == "--" for state in seen["torn"])
    assert {pages(device, 1, "lost", seed) for seed in range(20)} == {"a-------", "--------"}
