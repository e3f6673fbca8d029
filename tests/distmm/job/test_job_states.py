"""A job through any order of starts, stops, faults and damage: what is certified is right, and what is whole is kept.

`DISTMM_EXAMPLES=500` plays 500 histories of 30 steps. Each failure prints its steps.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from distmm import job
from distmm.errors import InputError, Stopped
from distmm.storage import open_matrix
from distmm.storage.output import Target
from tests.until import until

EXAMPLES = int(os.environ.get("DISTMM_EXAMPLES", "2"))
EDGE, ACROSS = 8, 3
BLOCKS = ACROSS**2
# Of the same blocks: three waves of three, one wave, nine waves.
PLANS = [f"g1x1x1 b{EDGE}x{EDGE}x{EDGE} p1 {waves}" for waves in ("w1x3 l1", "w1 l2", "w3x3 l1")]


class Killed(BaseException):
    """Ends the client's loop as an interrupt does."""


class After(job.Stop):
    """Ends a run once so many blocks more have their markers: asks it to stop, or kills its client."""

    def __init__(self, end: str, blocks: int) -> None:
        super().__init__()
        self.end, self.enough = end, blocks + len(markers())

    @property
    def reason(self) -> str | None:
        if self.end in ("stop", "kill") and len(markers()) >= self.enough:
            if self.end == "kill":
                raise Killed
            self.ask("enough")
        return super().reason


def markers() -> dict[str, int]:
    """Markers by name, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in Path().glob("C.zarr.job/*/*/done/*.json")}


@contextmanager
def full_disk(writes: int) -> Iterator[None]:
    """Let writes of blocks fail, but for the first ones."""
    left = iter(range(writes))
    write = Target.__setitem__

    def limited(self: Target, key: Any, block: Any) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, key, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "__setitem__", limited)
        yield


ENDS = st.tuples(st.sampled_from(["end", "stop", "kill", "full"]), st.integers(0, 5))


class JobStates(RuleBasedStateMachine):
    """One output, and all that is done to its job."""

    client: Client

    def __init__(self) -> None:
        super().__init__()
        self.before = Path.cwd()
        self.folder = tempfile.mkdtemp(prefix="distmm-states-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        os.chdir(self.folder)
        rng = np.random.default_rng(0)
        a, b = (rng.integers(1, 9, (EDGE * ACROSS, EDGE * ACROSS)).astype("f8") for _ in range(2))
        np.save("A.npy", a)
        np.save("B.npy", b)
        self.product, self.alpha = a @ b, 1
        self.whole: dict[str, int] = {}  # markers of blocks that nothing has happened to
        self.state: str | None = None

    def teardown(self) -> None:
        os.chdir(self.before)
        shutil.rmtree(self.folder)

    def run(self, end: tuple[str, int], resume: bool = False, **options: Any) -> None:
        """Make a run that ends in some way; check what it keeps, and what it says."""
        how, blocks = end
        stop = After(how, blocks)
        kept, raised = self.whole, None
        try:
            with full_disk(blocks if how == "full" else BLOCKS):
                if resume:
                    summary = job.resume("C.zarr", client=self.client, stop=stop)
                else:
                    call = {"alpha": self.alpha, "plan": PLANS[0], **options}
                    summary = job.multiply("A.npy", "B.npy", "C.zarr", client=self.client, stop=stop, **call)
        except (Stopped, Killed, InputError) as error:
            raised = error
        now = markers()
        if raised is None:
            assert summary.blocks == BLOCKS
            assert summary.kept == len(kept), "not all whole blocks were kept, or damaged ones were"
            self.whole, self.state = {}, "complete"
        else:
            assert how == {Stopped: "stop", Killed: "kill"}.get(type(raised), "full"), raised
            assert how != "full" or "No space left on device" in str(raised), raised
            again = [name for name, at in kept.items() if now.get(name) != at]
            assert not again, f"{again} were whole, and made again"
            self.whole, self.state = now, "stopped" if Path("C.zarr.job/manifest.json").exists() else None

    @initialize(plan=st.sampled_from(PLANS), end=ENDS)
    def start(self, plan: str, end: tuple[str, int]) -> None:
        self.run(end, plan=plan)

    @precondition(lambda self: self.state == "stopped")
    @rule(end=ENDS)
    def resume(self, end: tuple[str, int]) -> None:
        self.run(end, resume=True)

    @precondition(lambda self: self.state != "complete")
    @rule(plan=st.sampled_from(PLANS), end=ENDS)
    def call_again_with_any_plan_of_these_blocks(self, plan: str, end: tuple[str, int]) -> None:
        self.run(end, plan=plan)

    @precondition(lambda self: self.state is not None)
    @rule()
    def ask_for_something_else(self) -> None:
        with pytest.raises(InputError, match="--overwrite"):
            job.multiply("A.npy", "B.npy", "C.zarr", client=self.client, alpha=self.alpha + 1, plan=PLANS[0])

    @precondition(lambda self: self.state == "stopped")
    @rule()
    def change_the_blocks(self) -> None:
        with pytest.raises(InputError, match="blocks were"):
            job.multiply("A.npy", "B.npy", "C.zarr", client=self.client, alpha=self.alpha, blocks=(24, 24, 24))

    @rule(end=ENDS)
    def overwrite(self, end: tuple[str, int]) -> None:
        complete = self.state == "complete"
        self.whole, before = {}, (self.alpha, self.state)
        self.alpha += 1
        self.run(end, overwrite=True)
        if complete and self.state != "complete" and Path("C.zarr").exists():
            # The C that was there stays until the new one is complete.
            np.testing.assert_array_equal(open_matrix("C.zarr")[...], before[0] * self.product)

    @precondition(lambda self: self.whole)
    @rule(seed=st.integers(0, 99), how=st.sampled_from(["flip", "truncate", "delete", "unmark", "mark"]), end=ENDS)
    def damage_a_block_and_resume(self, seed: int, how: str, end: tuple[str, int]) -> None:
        rng = random.Random(seed)
        name = rng.choice(sorted(self.whole))
        del self.whole[name]
        (marker,) = Path().glob(f"C.zarr.job/*/*/done/{name}")
        i, j = (int(part) for part in name.removesuffix(".json").split("."))
        (chunk,) = (path for path in Path().glob(f"C.zarr.job/**/c/{i}/{j}") if path.is_file())
        if how == "flip":
            content = bytearray(chunk.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            chunk.write_bytes(content)
        elif how == "truncate":
            os.truncate(chunk, rng.randrange(chunk.stat().st_size))
        elif how == "delete":
            chunk.unlink()
        elif how == "unmark":
            marker.unlink()
        else:
            marker.write_bytes(b"{}")
        self.run(end, resume=True)

    @invariant()
    def what_is_certified_is_right_and_the_status_is_true(self) -> None:
        if self.state is None:
            return
        found = job.status("C.zarr")
        assert found.state == self.state
        assert found.total == BLOCKS
        if self.state == "complete":
            assert found.done == BLOCKS
            np.testing.assert_array_equal(open_matrix("C.zarr")[...], self.alpha * self.product)
        else:
            assert len(self.whole) <= found.done <= len(markers())
            until(lambda: not any(self.client.processing().values()))


def test_a_job_ends_right_through_any_history() -> None:
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        JobStates.client = client
        run_state_machine_as_test(
            JobStates,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=6 if EXAMPLES < 100 else 30,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
