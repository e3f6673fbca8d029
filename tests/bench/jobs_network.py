"""Jobs and products while the network fails: ``python tests/bench/jobs_network.py --faults 100``. Needs root.

Client, scheduler and two workers are processes, each on a host of its own (`faulty_network`): namespaces that this
program makes and removes. At seeded random moments one of these happens, for some seconds:

- *delay*, *loss*: packets between some hosts come late, or a part of them never;
- *one way*, *two ways*: nothing goes from one host to another, or between one host and all others;
- *asleep*: client, scheduler or a worker is stopped by SIGSTOP, and goes on;
- *overtaken*: the client is stopped until another one, on another host, has found its lock stale, has taken the job
  over, with ``--overwrite`` or without, and has ended it, or has been stopped itself. Then it goes on.

Some faults are shorter than Dask's timeouts, which are `network_site.TIMEOUTS` here, some longer. Who ends is started
again, until C has its name, also a client whose scheduler is lost (exit code 75). Then C must equal, to the bit, the C
of a job that nobody disturbed; nothing but C and its certificate may be left; no block that was marked may have been
written again; and a client that was overtaken must end with exit code 2, and change nothing when it wakes up. Every
third round is a product with `out=`, which is called again after an error. Prints one line a round and a summary; the
exit code is 1 if anything was wrong, or took longer than `DEADLINE`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from faulty_network import Link, Network, missing
from jobs_kills import PRELOAD, SPAWN, markers, operands, say
from network_site import DEADLINE, REFUSED, STOPPED, Site, run_client

HOSTS = ("client", "scheduler", "worker-0", "worker-1", "another")
FAULTS = ("delay", "loss", "one way", "two ways", "asleep", "overtaken")


class Round:
    """One job, or product, with some faults.

    Attributes
    ----------
    happened : Counter
        Faults, by kind, and clients that ended with exit code 75 and had to be started again.
    """

    def __init__(self, site: Site, seed: int, seconds: float) -> None:
        self.random, self.network, self.site, self.seconds = random.Random(seed), site.network, site, seconds
        self.product = seed % 3 == 2
        site.out = self.random.choice(["C.npy", "C.zarr", "C.h5"]) if not self.product else "out.zarr"
        site.how = "out" if self.product else "multiply"
        self.happened: Counter[str] = Counter()
        self.ends = time.monotonic() + DEADLINE

    def run(self, faults: int) -> bytes:
        """Return C.

        Raises
        ------
        AssertionError, TimeoutError
            If something is not as it must be, or the round hangs.
        """
        try:
            while not self._ended():
                self.site.start()
                self._wait(self.random.uniform(0, 0.6 * self.seconds) if faults else DEADLINE)
                if self.site.alive("client"):
                    self._fault()
                    faults -= 1
            return self._result()
        finally:
            self.network.heal()
            for name in HOSTS:
                self.site.signal(name, signal.SIGCONT)
            self.site.stop("client", "another")

    def _ended(self) -> bool:
        """Whether the client has done its work; one that had to stop is forgotten."""
        client = self.site.running.get("client")
        if client is None or client.is_alive():
            return False
        del self.site.running["client"]
        if client.exitcode == 0:
            return True
        assert client.exitcode == STOPPED, f"the client ended with {client.exitcode}: {self.site.said(client)}"
        self.happened["stopped (75)"] += 1
        if not self.product:
            self.site.how = self.random.choice(["multiply", "resume"])
        return False

    def _wait(self, seconds: float, ended: Callable[[], bool] | None = None) -> None:
        """Wait, at most until the client, or what is asked for, has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if (ended or (lambda: not self.site.alive("client")))():
                return
            if time.monotonic() > self.ends:
                raise TimeoutError(f"not finished after {DEADLINE:.0f} s and {dict(self.happened)}")
            time.sleep(0.02)

    def _fault(self) -> None:
        draw, links = self.random, self.network.links
        kind = draw.choice(FAULTS[:-1] if self.product else FAULTS)
        one, other = draw.sample(HOSTS[:-1], 2)
        pairs = {(one, other)} if draw.random() < 0.5 else {(one, any_) for any_ in HOSTS if any_ != one}
        long = kind in ("one way", "two ways", "asleep") and draw.random() < 0.4
        seconds = draw.uniform(8, 16) if long else draw.uniform(0.2, 3)
        before = markers(self.site.folder, self.site.out)
        self.happened[kind] += 1
        if kind == "overtaken":
            self._overtake()
            return
        if kind == "asleep":
            self.site.signal(one, signal.SIGSTOP)
        elif kind == "one way":
            links.update(dict.fromkeys(pairs, Link(loss=1)))
        else:
            link = Link(loss=1)
            if kind == "delay":
                link = Link(delay=draw.uniform(0.05, 0.5))
            elif kind == "loss":
                link = Link(loss=draw.uniform(0.02, 0.4))
            links.update(dict.fromkeys(pairs | {pair[::-1] for pair in pairs}, link))
        self._wait(seconds)
        self.network.heal()
        self.site.signal(one, signal.SIGCONT)
        after = markers(self.site.folder, self.site.out)
        again = [name for name, when in before.items() if after.get(name, when) != when]
        assert not again, f"written again after {kind}: {again}"

    def _overtake(self) -> None:
        """Stop the client, let another one do its work, and wake it up."""
        site = self.site
        site.signal("client", signal.SIGSTOP)
        how = self.random.choice(["multiply", "resume", "overwrite"])
        client, another = site.running["client"], site.launch("another", run_client, str(site.folder), site.out, how)
        self._wait(DEADLINE, lambda: not another.is_alive())
        assert another.exitcode in (0, STOPPED), f"who took over ended with {another.exitcode}: {site.said(another)}"
        before = snapshot(site.folder)
        site.signal("client", signal.SIGCONT)
        self._wait(DEADLINE)
        said = site.said(client)
        changed = sorted(dict(before.items() ^ snapshot(site.folder).items()))
        # Where the other one had to stop, a client that had not yet taken the lock when it was stopped does the rest.
        lawful = another.exitcode == STOPPED and client.exitcode in (0, STOPPED)
        assert lawful or not changed, f"the client that was overtaken ({client.exitcode}) has changed {changed}: {said}"
        # It may have been asleep before it took the lock; then C is there already, or has been begun by another one.
        clear = client.exitcode == REFUSED and any(words in said for words in REFUSALS)
        assert client.exitcode in (0, STOPPED) or clear, f"the client that was overtaken ended with {said}"
        self.happened[f"overtaken: ended with {client.exitcode}"] += 1
        # `another` is the client from now on. If it had to stop, `client` is started again.
        del site.running["client"], site.running["another"]
        if another.exitcode == 0:
            site.running["client"] = another

    def _result(self) -> bytes:
        """Take C's bytes and remove all that is left, which must be no more than C, its certificate and report."""
        from distmm.storage import open_matrix

        folder, out = self.site.folder, self.site.out
        time.sleep(0.2 if self.product else 0)
        content: bytes = open_matrix(folder / out)[...].tobytes()
        expected = {out, *(() if self.product else (f"{out}.certificate.json", f"{out}.report.html"))}
        left = set(os.listdir(folder)) - {name for name in os.listdir(folder) if name.startswith(KEPT)}
        assert left <= expected, f"left behind: {sorted(left - expected)}"
        assert self.product or f"{out}.certificate.json" in left, "there is no certificate"
        if not self.product:
            from distmm import job

            verdict = job.recheck(folder / out)
            assert verdict.outcome == "right", verdict.message
        return content


KEPT = ("A.", "B.", "scheduler-", "said-")
REFUSALS = ("another job has", "another call has", "exists; give another name")


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of all files of a job, but for operands, locks and what the program itself writes."""
    found = {}
    for here, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(here, name)
            if not os.path.relpath(path, folder).startswith(KEPT) and not name.startswith("lock."):
                stat = os.stat(path)
                found[path] = stat.st_size, stat.st_mtime_ns
    return found


def clear(folder: Path) -> None:
    """Remove all but the operands, and where the scheduler is."""
    for name in os.listdir(folder):
        if not name.startswith(("A.", "B.", "scheduler-")):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if (why := missing()) is not None:
        say(f"this program cannot run here: {why}")
        return 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and remove what was made
    SPAWN.set_forkserver_preload(PRELOAD)
    folder = Path(tempfile.mkdtemp(prefix="distmm-network-"))
    total, wrong, hung, seed, began = Counter[str](), 0, 0, options.seed, time.monotonic()
    try:
        operands(folder)
        with Network(HOSTS, options.seed) as network:
            site = Site(network, folder)
            expected, seconds = Round(site, 0, 1.0).run(0), time.monotonic() - began
            say(f"undisturbed: {seconds:.1f} s")
            clear(folder)
            while (left := options.faults - sum(total[kind] for kind in FAULTS)) > 0:
                one = Round(site, seed, 6.0)
                try:
                    assert one.run(min(8, left)) == expected, "C differs"
                    verdict = "right"
                except TimeoutError as error:
                    hung, verdict = hung + 1, f"HUNG: {error}"
                    site.stop(*HOSTS)
                except AssertionError as error:
                    wrong, verdict = wrong + 1, f"WRONG: {error}"
                    site.stop(*HOSTS)
                total.update(one.happened)
                say(f"seed {seed}, {one.site.out}: {verdict} {dict(one.happened)}, {time.monotonic() - began:.0f} s")
                clear(folder)
                seed += 1
            site.stop(*HOSTS)
            packets = dict(network.packets)
    finally:
        shutil.rmtree(folder)
    faults = sum(total[kind] for kind in FAULTS)
    say(
        f"{seed - options.seed} jobs and products, {faults} faults {dict(total)}, packets {packets}: "
        f"{wrong} wrong, {hung} hung, {time.monotonic() - began:.0f} s"
    )
    return 1 if wrong or hung else 0


if __name__ == "__main__":
    sys.exit(main())
