"""A real Prometheus that scrapes what a test says."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.until import until

Ask = Callable[[str], list[dict[str, Any]]]


@contextmanager
def scraping(prometheus: str, configuration: str, folder: Path) -> Iterator[Ask]:
    """Start Prometheus in a folder, wait until it answers, and yield a function that asks it a query."""
    (folder / "prometheus.yml").write_text(configuration)
    arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = [prometheus, *arguments, "--web.listen-address=127.0.0.1:0"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        said = (folder / "log").read_text

        def ask(expression: str) -> list[dict[str, Any]]:
            path = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
            with urllib.request.urlopen(path) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found

        def ready() -> bool:
            with suppress(urllib.error.HTTPError), urllib.request.urlopen(f"http://{address}/-/ready"):
                return True
            return False

        try:
            listens = re.compile(r'"Listening on" address=(\S+)')
            address = until(lambda: process.poll() is None and listens.search(said()), said)[1]
            until(ready, said)
            yield ask
        finally:
            process.terminate()
