"""Write requirements.txt and build.txt: every package of the image with its version and the hashes of its wheels.

``python deploy/docker/lock.py``, with Python 3.12 on x86_64, whose pip resolves for itself. The wheels are those of
Linux on x86_64 and on aarch64 (Grace Hopper).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent
PROJECT = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())

# s3fs: Zarr arrays in an object store.
PRODUCT = [
    *PROJECT["project"]["dependencies"],
    *PROJECT["project"]["optional-dependencies"]["cuda13"],
    *PROJECT["project"]["optional-dependencies"]["tls"],
    "s3fs",
]
LOCKS = {"requirements.txt": PRODUCT, "build.txt": PROJECT["build-system"]["requires"]}

# glibc of the image's base, Debian 12, is 2.36.
GLIBC = ("2_34", "2_28", "2_27", "2_26", "2_24", "2_17")


def resolved(requirements: list[str], machine: str, *options: str) -> dict[str, str]:
    """Return ``name==version`` of all packages that these need, with the hash of the wheel for a kind of machine."""
    platforms = [word for glibc in GLIBC for word in ("--platform", f"manylinux_{glibc}_{machine}")]
    platforms += ["--platform", f"manylinux2014_{machine}"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-"]
    command += ["--only-binary=:all:", "--target=none", *platforms, *options, *requirements]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return {
        f"{one['metadata']['name'].lower().replace('_', '-')}=={one['metadata']['version']}": one["download_info"][
            "archive_info"
        ]["hashes"]["sha256"]
        for one in report["install"]
    }


for name, requirements in LOCKS.items():
    first = resolved(requirements, "x86_64")
    second = resolved([*first], "aarch64", "--no-deps")
    lines = [f"# The wheels of the image, for Python 3.12; made by {Path(__file__).name}."]
    for pin in sorted(first):
        lines += [" \\\n    ".join([pin, *(f"--hash=sha256:{sha}" for sha in sorted({first[pin], second[pin]}))])]
    (FOLDER / name).write_text("\n".join(lines) + "\n")
