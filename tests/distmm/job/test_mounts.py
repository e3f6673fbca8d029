"""A job on a full disk, or one whose mount has gone, says so, keeps what is finished, and goes on when it is mended.

File systems are really filled and unmounted, in a mount namespace of the test's own: nothing outside it sees them, and
nothing is left of them. An ordinary user may have one where the system allows user namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import run_to_end

CASES = Path(__file__).with_name("mount_cases.py")

NAMESPACES = (["unshare", "--map-root-user", "--mount"], ["unshare", "--mount"])


def namespace(folder: Path) -> list[str]:
    """Command that runs another one where it may mount."""
    refused = []
    for command in NAMESPACES:
        try:
            done = subprocess.run(
                [*command, "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, text=True, check=False
            )
        except FileNotFoundError as error:
            pytest.skip(f"there are no mount namespaces here: {error}")
        if done.returncode == 0:
            return command
        refused.append(done.stderr.strip())
    pytest.skip(f"mounting is not permitted here: {'; '.join(refused)}")


@pytest.mark.minutes
def test_full_and_vanished_disks(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options = ["-p", "no:cacheprovider", "-q", "--tb=short", "--basetemp", str(tmp_path / "cases")]
    done = run_to_end([*namespace(tmp_path), sys.executable, "-m", "pytest", *options, str(CASES)], environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
