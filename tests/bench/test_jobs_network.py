"""Some faults of a network; `tests/bench/jobs_network.py` makes as many as it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import faulty_network
from tests.bench.faulty_network import Link, Network

PROGRAM = Path(__file__).parent / "jobs_network.py"

# A packet that is sent, and what comes back.
SERVE = "import socket; s = socket.socket(2, 2); s.bind(('', 77)); print('here', flush=True); print(s.recv(9).decode())"
SEND = "import socket, sys; socket.socket(2, 2).sendto(sys.argv[2].encode(), (sys.argv[1], 77))"


@pytest.fixture
def _namespaces() -> None:
    """Skip where there are no network namespaces; in CI fail."""
    if (why := faulty_network.missing()) is None:
        return
    if os.environ.get("DISTMM_CI"):
        pytest.fail(why)
    pytest.skip(why)


@pytest.mark.usefixtures("_namespaces")
def test_packets_are_lost_in_one_direction_and_nothing_is_left_of_the_network() -> None:
    with Network(["one", "two"]) as network:

        def command(host: str, *code: str) -> list[str]:
            return ["ip", "netns", "exec", network.namespaces[host], sys.executable, "-c", *code]

        for to, sender in (("one", "two"), ("two", "one")):
            with subprocess.Popen(command(to, SERVE), stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                assert server.stdout.readline() == "here\n"
                network.links[sender, to] = Link(loss=1)
                subprocess.run(command(sender, SEND, network.addresses[to], "lost"), check=True)
                network.links[sender, to] = Link(delay=0.01)
                network.links[to, sender] = Link(loss=1)
                subprocess.run(command(sender, SEND, network.addresses[to], "late"), check=True)
                assert server.stdout.read() == "late\n"
            network.heal()
    assert network.packets["lost"] >= 2
    assert network.packets["delayed"] >= 2
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in left for name in network.namespaces.values())


@pytest.mark.minutes
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_namespaces")
def test_jobs_and_products_are_right_although_the_network_fails(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "--faults", "8", "--seed", "1"], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 0 wrong, 0 hung" in ended.stdout
