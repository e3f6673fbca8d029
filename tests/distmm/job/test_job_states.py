"""A job through any order of starts, stops, kills and damage: what is certified is right, and what is whole is kept.

`DISTMM_EXAMPLES=500` plays 500 histories of 30 steps. Each failure prints its steps.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from distmm import job
from distmm.errors import InputError, Stopped
from distmm.storage import flat, open_matrix, reopen_output
from distmm.storage.output import TargetArray
from tests import forked
from tests.distmm.job.killed_runs import ENDING_SECONDS, EVENTS, Enough, KilledRun, markers
from tests.until import until

EXAMPLES = int(os.environ.get("DISTMM_EXAMPLES", "2"))
EDGE, ACROSS = 8, 3
BLOCKS = ACROSS**2
# Of the same blocks: three waves of three, one wave, nine waves.
PLANS = [f"g1x1x1 b{EDGE}x{EDGE}x{EDGE} p1 {waves}" for waves in ("w1x3 l1", "w1 l2", "w3x3 l1")]
OUTPUTS = ["C.zarr", "C.npy", "C.h5"]
DAMAGES = ["flip", "cut", "delete", "unmark", "mark"]

# How a run ends, after how many blocks (or changes of files), and whether a kill takes the whole cluster. No rule has a
# precondition: what a worker does after a kill is a race, and Hypothesis repeats a history by its choices.
ENDS = st.tuples(st.sampled_from(["end", "stop", "full", *EVENTS]), st.integers(0, 119), st.booleans())

End = tuple[str, int, bool]

AT_REST = {"memory", "released", "error", "forgotten"}  # states of Dask's tasks on a worker


@contextmanager
def full_disk(writes: int) -> Iterator[None]:
    """Let writes of blocks fail, but for the first ones."""
    left = iter(range(writes))
    write = TargetArray.__setitem__

    def limited(self: TargetArray, key: Any, block: Any) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, key, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetArray, "__setitem__", limited)
        yield


class JobStates(RuleBasedStateMachine):
    """One output, and all that is done to its job."""

    client: Client
    cluster: LocalCluster

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
        self.named: int | None = None  # alpha of the C that has its name
        self.whole: dict[str, int] = {}  # markers of blocks that nothing has happened to
        self.damaged: dict[str, int] = {}  # markers of blocks that have changed since
        self.state: str | None = None
        self.held: KilledRun | None = None  # a worker is in the middle of a write of this run

    def teardown(self) -> None:
        self.at_rest(None)
        os.chdir(self.before)
        shutil.rmtree(self.folder)

    # What is found on the disk

    @property
    def work(self) -> Path:
        """The folder of the unfinished job."""
        return next(Path(f"{self.out}.job").rglob("done")).parent

    def unfinished(self) -> tuple[str | None, int | None]:
        """Id and alpha of the unfinished job."""
        manifest = Path(f"{self.out}.job/manifest.json")
        if not manifest.exists():
            return None, None
        content = json.loads(manifest.read_text())
        return content["id"], content["spec"]["alpha"]

    def at_rest(self, held: KilledRun | None) -> None:
        """Wait until the worker has ended all tasks, but for a write that is held. Let the one held before go on."""
        if self.held is not None:
            self.held.release()
        self.held = held if held is not None and held.held else None
        (worker,) = self.cluster.workers.values()
        # The worker takes messages in their order: after this task it knows which tasks of a dead client are cancelled.
        self.client.submit(int, pure=False).result()

        def unfinished() -> list[str]:
            tasks = list(worker.state.tasks.values())
            return [f"{each.key}: {each.state}" for each in tasks if each.state not in AT_REST]

        until(lambda: len(unfinished()) <= int(self.held is not None), unfinished)

    # Runs

    def run(self, end: End, resume: bool = False, **options: Any) -> None:
        """Make a run that ends in some way; check what it keeps, and what it says."""
        how, count, alone = end
        if self.state == "complete" and "overwrite" not in options and not os.path.exists(f"{self.out}.job"):
            how = "end"  # nothing is left to do
        call = None if resume else {"alpha": self.alpha, "plan": PLANS[0], **options}
        anew = bool(options.get("overwrite"))
        before, kept, killed = self.unfinished(), self.whole, None
        done: tuple[int, int] | None
        if how in EVENTS:
            killed = KilledRun(how, count if how == "changes" else count % 6, None if alone else self.cluster)
            done = killed.play(self.out, call)
        else:
            done = self.undisturbed(how, count % 6, call)
        self.at_rest(killed)
        now = self.unfinished()
        again = [name for name, at in kept.items() if now[0] == before[0] and markers(self.out).get(name) != at]
        assert not again or done, f"{again} were whole, and made again"
        if done is not None:
            complete = self.state == "complete" and not anew
            assert done == (BLOCKS, BLOCKS if complete else 0 if anew else len(kept)), "blocks kept: all that are whole"
            allowed = {self.alpha if call is None else call["alpha"]}
            assert now[0] is None
            left = set(os.listdir()) - {f"{self.out}.report.html"}
            assert left == {"A.npy", "B.npy", self.out, f"{self.out}.certificate.json"}
        else:
            allowed = {self.named, before[1]} | (set() if call is None else {call["alpha"]})
        self.look(now, allowed, same=now[0] == before[0])

    def undisturbed(self, how: str, count: int, call: dict[str, Any] | None) -> tuple[int, int] | None:
        """Make a run in this process; return its blocks and those kept. None if it has stopped, or the disk is full."""
        stop = Enough(self.out, count, lambda stop: stop.ask("enough")) if how == "stop" else job.Stop()
        try:
            with full_disk(count if how == "full" else BLOCKS):
                if call is None:
                    summary = job.resume(self.out, client=self.client, stop=stop)
                else:
                    summary = job.multiply("A.npy", "B.npy", self.out, client=self.client, stop=stop, **call)
        except Stopped:
            assert how == "stop"
            return None
        except InputError as error:
            if how == "full" and "No space left on device" in str(error):
                return None
            raise
        return summary.blocks, summary.kept

    def look(self, now: tuple[str | None, int | None], allowed: set[int | None], same: bool) -> None:
        """See which job a run has left, and which C: the one from before, or that of a job which has ended."""
        if os.path.exists(self.out):
            c = open_matrix(self.out)[...]
            alpha = int(c[0, 0] / self.product[0, 0])
            np.testing.assert_array_equal(c, alpha * self.product)
            assert alpha in allowed
            self.named = alpha
        assert (self.named is not None) == os.path.exists(self.out), "a C has lost its name"
        self.damaged = self.damaged if same else {}
        self.whole = {}
        if now[0] is not None:
            self.state, self.alpha = "stopped", now[1]
            assert now[1] is not None
            found = markers(self.out)
            self.whole = {name: at for name, at in found.items() if self.damaged.get(name) != at}
        elif self.named is not None:
            self.state, self.alpha = "complete", self.named
            certificate = json.loads(Path(f"{self.out}.certificate.json").read_text())
            assert certificate["spec"]["alpha"] == self.named
        else:
            self.state = None

    @initialize(out=st.sampled_from(OUTPUTS), plan=st.sampled_from(PLANS), end=ENDS)
    def start(self, out: str, plan: str, end: End) -> None:
        self.out = out
        self.run(end, plan=plan)

    @rule(end=ENDS)
    def resume(self, end: End) -> None:
        if self.state is None:
            with pytest.raises(InputError, match="there is no unfinished job"):
                job.resume(self.out, client=self.client)
        else:
            self.run(end, resume=True)

    @rule(plan=st.sampled_from(PLANS), end=ENDS)
    def call_again_with_any_plan_of_these_blocks(self, plan: str, end: End) -> None:
        self.run(end, plan=plan)

    @rule()
    def ask_for_something_else(self) -> None:
        if self.state is not None:
            with pytest.raises(InputError, match="--overwrite"):
                job.multiply("A.npy", "B.npy", self.out, client=self.client, alpha=self.alpha + 1, plan=PLANS[0])

    @rule()
    def change_the_blocks(self) -> None:
        if self.state == "stopped":
            with pytest.raises(InputError, match="blocks were"):
                job.multiply("A.npy", "B.npy", self.out, client=self.client, alpha=self.alpha, blocks=(24, 24, 24))

    @rule(end=ENDS)
    def overwrite(self, end: End) -> None:
        self.run(end, overwrite=True, alpha=self.alpha + 1)

    # Damage

    @rule(seed=st.integers(0, 99), how=st.sampled_from(DAMAGES), end=ENDS)
    def damage_a_block_and_resume(self, seed: int, how: str, end: End) -> None:
        if not self.whole or not (self.work / self.out).exists():
            return
        rng = random.Random(seed)
        name = rng.choice(sorted(self.whole))
        marker = self.work / "done" / name
        if how == "unmark":
            marker.unlink()
            del self.whole[name]
        elif how == "mark":
            marker.write_bytes(b"{}")
            self.spoil(name)
        else:
            i, j = (int(part) for part in name.removesuffix(".json").split("."))
            (self.damage_chunk if self.out.endswith(".zarr") else self.damage_file)(how, i, j, rng)
        self.run(end, resume=True)

    def spoil(self, name: str) -> None:
        """Note that a block, or its marker, is not what the job has written."""
        if self.whole.pop(name, None) is not None:
            self.damaged[name] = markers(self.out)[name]

    def damage_chunk(self, how: str, i: int, j: int, rng: random.Random) -> None:
        chunk = self.work / self.out / "c" / str(i) / str(j)
        if how == "flip":
            flip(chunk, rng.randrange(chunk.stat().st_size), rng)
        elif how == "cut":
            os.truncate(chunk, rng.randrange(chunk.stat().st_size))
        else:
            chunk.unlink()
        self.spoil(f"{i}.{j}.json")

    def damage_file(self, how: str, i: int, j: int, rng: random.Random) -> None:
        """Damage a file with all blocks. Without its end, or if it is lost, it is refused until it is whole again."""
        draft = self.work / self.out
        target = reopen_output(os.path.abspath(self.out), os.path.abspath(draft), False)
        first, width, nbytes = target.offset, EDGE * ACROSS * 8, 8 * math.prod(target.shape)
        if how == "flip":
            row, byte = EDGE * i + rng.randrange(EDGE), rng.randrange(EDGE * 8)
            flip(draft, first + row * width + EDGE * j * 8 + byte, rng)
            self.spoil(f"{i}.{j}.json")
            return
        content, cut = draft.read_bytes(), first + rng.randrange(nbytes)
        if how == "cut":
            os.truncate(draft, cut)
        else:
            os.rename(draft, "aside")
        with pytest.raises(InputError, match=re.escape(f"/{self.out}: ")):
            job.resume(self.out, client=self.client)
        self.at_rest(None)
        draft = self.work / self.out
        if how == "delete":
            os.rename("aside", draft)
            return
        last = first + nbytes
        with open(draft, "r+b") as file:  # the lost elements are zeros
            file.seek(cut)
            file.write(bytes(last - cut) + content[last:])
        for row, column in np.ndindex(ACROSS, ACROSS):
            end = first + (EDGE * row + EDGE - 1) * width + EDGE * (column + 1) * 8
            if end > cut:
                self.spoil(f"{row}.{column}.json")

    @invariant()
    def the_status_is_true(self) -> None:
        if self.state is None:
            with pytest.raises(InputError, match="there is no unfinished job"):
                job.status(self.out)
            return
        found = job.status(self.out)
        assert found.state == ("failed" if found.error is not None else self.state)
        assert found.error is None or self.state == "stopped"
        assert found.total == BLOCKS
        if self.state == "complete":
            assert found.done == BLOCKS
        else:
            assert len(self.whole) <= found.done <= len(markers(self.out))


def flip(path: Path, at: int, rng: random.Random) -> None:
    """Flip a bit of a byte of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


@pytest.fixture(scope="module")
def _one_worker() -> Iterator[None]:
    """A worker in this process, whose writes the tests can hold, for clients in any process."""
    with (
        pytest.MonkeyPatch.context() as patch,
        forked.workers(),
        LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, protocol="tcp", dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        patch.setattr(flat, "ENDING_SECONDS", ENDING_SECONDS)
        JobStates.client, JobStates.cluster = client, cluster
        yield


@pytest.mark.usefixtures("_one_worker")
@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        (EXAMPLES, 6 if EXAMPLES < 100 else 30),
        pytest.param(10, 30, marks=[pytest.mark.minutes, pytest.mark.timeout(1200)]),
    ],
    ids=["some", "ten"],
)
def test_a_job_ends_right_through_any_history(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        JobStates,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.minutes
@pytest.mark.usefixtures("_one_worker")
@pytest.mark.parametrize("out", [OUTPUTS[0], *(pytest.param(out, marks=pytest.mark.minutes) for out in OUTPUTS[1:])])
def test_a_job_ends_right_after_each_kind_of_kill(out: str) -> None:
    """One history with what the few random ones of a run of all tests may leave out."""
    machine = JobStates()
    try:
        machine.start(out, PLANS[0], ("write", 2, True))
        machine.damage_a_block_and_resume(1, "flip", ("held", 1, False))
        machine.damage_a_block_and_resume(2, "cut", ("markers", 2, False))
        machine.resume(("end", 0, False))
        machine.overwrite(("changes", 25, True))
        assert machine.named == 1, "the C from before is gone"
        machine.the_status_is_true()
        machine.resume(("end", 0, False))
        machine.the_status_is_true()
        assert (machine.state, machine.named) == ("complete", 2)
    finally:
        machine.teardown()
