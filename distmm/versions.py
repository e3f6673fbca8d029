"""Versions of distmm, of Python and of installed packages."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distributions, version

try:
    __version__ = version("distmm")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of Python, and of each of `packages` that is installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        for each in distributions(name=package):
            found.setdefault(package, each.version)
    return found
