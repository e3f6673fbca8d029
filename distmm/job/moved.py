"""Jobs whose folder, or whose C, was renamed: the paths in a manifest or certificate that do not hold any more."""

from __future__ import annotations

import os
from typing import Any

from distmm.storage import file_of, is_url, locate

__all__ = ["relocated"]

Json = dict[str, Any]


def relocated(content: Json, target: str) -> Json:
    """Return a manifest or certificate with the paths that hold now.

    Parameters
    ----------
    content : dict
    target : str
        Path or URL that C has now.

    Returns
    -------
    dict
        C has the path `target`. A, B or C0 that is not at its old path, but at the same place relative to C, has this
        path.
    """
    named = content["output"]["name"]
    file, dataset = (named, None) if is_url(named) else locate(named)
    if file == target:
        return content
    spec = dict(content["spec"])
    for name in ("A", "B", "C0"):
        path = (spec[name] or {}).get("path")
        if path is not None and not any(map(is_url, (path, file, target))) and not os.path.exists(file_of(path)):
            beside = os.path.relpath(path, os.path.dirname(file))
            now = os.path.normpath(os.path.join(os.path.dirname(target), beside))
            if os.path.exists(file_of(now)):
                spec[name] = {**spec[name], "path": now}
    named = target if dataset is None else f"{target}:{dataset}"
    return {**content, "spec": spec, "output": {**content["output"], "name": named}}
