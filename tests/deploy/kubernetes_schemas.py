"""The schemas of Kubernetes and of Dask's operator, and the job file whose manifests are held against them."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

import pytest
import yaml

from distmm.submit import manifests

KUBERNETES_VERSION = "1.32"

jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

JOB = """\
[product]
a = "/data/A.npy"
b = "/data/B.npy"
c = "/data/C.zarr"
[run]
name = "product"
folder = "run"
tls = "temporary"
[workers]
per_node = 2
device = "cpu"
cpus = 2
memory = "1GB"
[kubernetes]
claim = "matrices"
"""


def check(manifest: dict[str, Any]) -> None:
    """Validate by the operator's own definition of its resources, or by Kubernetes' schema; unknown keys are errors."""
    if manifest["apiVersion"] != manifests.DASK_API:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
        return
    for error in definition(manifest["kind"]).iter_errors(manifest):
        raise error


@functools.cache
def definition(kind: str) -> Any:
    chart = files("dask_kubernetes") / "operator" / "deployment" / "helm" / "dask-kubernetes-operator" / "crds"
    (version,) = yaml.safe_load((chart / f"{kind.lower()}.yaml").read_text())["spec"]["versions"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"] |= {"apiVersion": {}, "kind": {}, "metadata": {}}
    return jsonschema.Draft7Validator(schema)


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse keys that the API server would drop without a word; let it convert what it may be either way."""
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema = {**schema, "additionalProperties": False}
    if schema.get("x-kubernetes-int-or-string"):
        schema = {**schema, "type": ["integer", "string"]}
    found = {}
    for key, value in schema.items():
        if key == "properties":
            value = {name: strict(part) for name, part in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            value = strict(value)
        found[key] = value
    return found
