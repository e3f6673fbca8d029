"""Programs that tests run to their end, such as a pytest in another mode."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence


def run_to_end(command: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program, and return what it has said and its exit code; if the test is stopped, so are its processes."""
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            out, err = program.communicate()
        except BaseException:
            os.killpg(program.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)
