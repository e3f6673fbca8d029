"""A real Slurm for the tests of this folder: munge, slurmctld and two slurmd, all in one temporary folder."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.ports import free_ports
from tests.until import until

ROOT = Path(__file__).parents[2]
NODES = 2
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")

# cred_expire: a requeued job waits until its old credential has expired, two minutes by default.
# The two GPUs of a node are empty files: Slurm counts them and hands them out, and no more is needed here.
SLURM_CONF = """\
ClusterName=distmm
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=60
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[2]}-{ports[3]}]
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=ALL MaxTime=1 State=UP
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 State=UP
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF State=UP
"""


# Starts the daemon of a node again if it crashes, as systemd does: that of Debian 12 (22.05) has ended by a segfault.
NODE = 'trap : TERM; until slurmd -D -f "$0" -N "$1"; do sleep 1; done'


@pytest.fixture(autouse=True)
def user_data(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of jobs go to a temporary folder, not to the data of the user who runs the tests."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="session")
def slurm() -> Iterator[Path]:
    """Start Slurm on two nodes that are both this machine; yields the folder of its configuration and logs."""
    missing = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    if missing:
        message = f"no Slurm here ({', '.join(missing)} missing): apt-get install slurm-wlm munge"
        if os.environ.get("DISTMM_CI"):
            pytest.fail(message)
        pytest.skip(message)
    with tempfile.TemporaryDirectory(prefix="distmm-slurm-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setenv("PATH", _path())
        patch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / part) for part in ("", "kernels")))
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        running: list[subprocess.Popen[bytes]] = []
        try:
            _start(folder, running)
            yield folder
        finally:
            for process in reversed(running):
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def _path() -> str:
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def _start(folder: Path, running: list[subprocess.Popen[bytes]]) -> None:
    for name in ("state", *(f"spool-n{n + 1}" for n in range(NODES))):
        (folder / name).mkdir()
    host = socket.gethostname().split(".")[0]
    ports = free_ports(4)  # consecutive: those of slurmd are given as a range
    conf = SLURM_CONF.format(host=host, ports=ports, folder=folder, user=getpass.getuser(), nodes=NODES)
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
    for gpu in range(2):
        (folder / f"gpu{gpu}").touch()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    munge = [f"--{what}={folder}/munge.{what}" for what in ("socket", "pid-file", "log-file", "seed-file")]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", *munge],
        ["slurmctld", "-D", "-f", f"{folder}/slurm.conf"],
        *(["sh", "-c", NODE, f"{folder}/slurm.conf", f"n{n + 1}"] for n in range(NODES)),
    ]

    def logs() -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-800:]}" for path in sorted(folder.glob("*.out")))

    def seen() -> list[str]:
        sinfo = ["sinfo", "-h", "-p", "all", "-N", "-o", "%t"]
        return subprocess.run(sinfo, capture_output=True, text=True, check=False).stdout.split()

    for command in commands:
        with (folder / f"{len(running)}-{command[0]}.out").open("wb") as out:
            # In the folder, where the core file of a daemon that crashes is removed with it.
            running.append(subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, start_new_session=True))
        if command[0] == "munged":  # the others end if it is not there
            until((folder / "munge.socket").exists, logs)
    until(lambda: seen() == ["idle"] * NODES, lambda: f"Slurm did not start: {seen()}\n{logs()}")
