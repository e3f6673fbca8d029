"""Types of the values of a job file: each has its check, and the words that say what is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any
from urllib.parse import urlsplit

from dask.utils import parse_bytes
from pydantic import AfterValidator

from distmm.units import seconds


def _check(holds: Callable[[Any], object], what: str) -> AfterValidator:
    """Refuse a value for which `holds` is false or raises ValueError; `what` completes "KEY = VALUE is not ..."."""

    def checked(value: Any) -> Any:
        with suppress(ValueError, OverflowError):
            if holds(value):
                return value
        raise ValueError(what)

    return AfterValidator(checked)


def _matching(pattern: str, what: str) -> AfterValidator:
    return _check(re.compile(pattern).fullmatch, what)


def in_range(least: int, most: int = 100_000) -> AfterValidator:
    """Refuse numbers outside of a range, to which both ends belong."""
    return _check(lambda value: least <= value <= most, f"a number from {least} to {most}")


def _is_safe(path: str) -> bool:
    """Whether the path contains no ``..``, and no program or shell reads it as an option or expands it."""
    return bool(
        re.match("(?i)(?!file:|local:)[^-~]", path)
        and path.isprintable()
        and not set(path) & set("\"\\'`")
        and ".." not in re.split(r"[/\\:]", path)
    )


PATH_RULE = "a path of printable characters without .., quotes, \\, or - ~ file: at its start: write it absolute"
NAME = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"  # valid as DNS label, Slurm job name and file name
NAME_RULE = "a name of at most 40 lower-case letters, digits and -, that starts with a letter"
PLAN = r"|g\d{1,6}(x\d{1,6}){2} b\d{1,12}(x\d{1,12}){2} p\d{1,6} w\d{1,6}(x\d{1,6}){0,2} l\d{1,4}"
EDGE = r"[1-9]\d{0,11}"
NODES = r"[A-Za-z0-9_.,:*&|()\[\]-]{0,200}"
IMAGE = r"[a-z0-9][A-Za-z0-9._:/@-]{0,400}"

# Kubernetes' rules for a DNS label, for the name of an object (DNS labels with dots between them), and for the key of a
# label or annotation, which may start with such a name and a slash. The name of an extended resource must do so.
DNS_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
OBJECT = rf"(?![a-z0-9.-]{{254}}){DNS_LABEL}(\.{DNS_LABEL})*"
LABEL_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
LABEL_KEY = rf"({OBJECT}/)?{LABEL_NAME}"
LABEL_VALUE = rf"({LABEL_NAME})?"
RESOURCE = rf"(?!(.*\.)?kubernetes\.io/|requests\.){OBJECT}/{LABEL_NAME}"
ENDPOINT = rf"https?://{OBJECT}(:\d{{1,5}})?/?"

# Keys that a job file must not set: the operator or distmm sets them, or the operator ignores them.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
OWN_LABELS = (
    rf"([a-z.]+\.)?dask\.org/.*|app\.kubernetes\.io/(name|instance)|sidecar\.istio\.io/inject|{re.escape(QUEUE_LABEL)}"
)
LOST_ANNOTATIONS = r"(kubectl\.kubernetes\.io|kopf\.zalando\.org)/.*"


def _are_pairs(holds: Callable[[str], object], excluded: str) -> Callable[[dict[str, str]], bool]:
    """Whether keys follow Kubernetes' rules, are none of the `excluded` ones, and `holds` is true of their values."""
    return lambda pairs: all(
        re.fullmatch(LABEL_KEY, key) and holds(value) and not re.fullmatch(excluded, key)
        for key, value in pairs.items()
    )


def _is_endpoint(url: str) -> bool:
    return not url or bool(re.fullmatch(ENDPOINT, url) and urlsplit(url).port != 0)  # a port above 65535 is an error


LABELS_RULE = (
    'labels by Kubernetes\' rules, such as { team = "physics" }: names and values of at most 63 letters, digits, -, _ '
    "and ., none of dask.org, app.kubernetes.io or Istio's injection; set the queue of Kueue by kubernetes.queue"
)
ANNOTATIONS_RULE = (
    'annotations by Kubernetes\' rules, such as { "example.com/owner" = "physics" }: values of one line, none of '
    "kubectl.kubernetes.io or kopf.zalando.org, which the operator ignores"
)

# If a pattern allows an empty text, the empty text means the same as no key.
Path = Annotated[str, _check(_is_safe, PATH_RULE)]
Name = Annotated[str, _matching(NAME, NAME_RULE)]
SIZE_RULE = "a size of a megabyte or more, such as 480GB"
Size = Annotated[str, _check(lambda text: parse_bytes(text) >= 2**20, SIZE_RULE)]
SizeOrNone = Annotated[str, _check(lambda text: not text or parse_bytes(text) >= 2**20, SIZE_RULE)]
Duration = Annotated[str, _check(lambda text: seconds(text) >= 1, "a time such as 90m, 12h or 04:00:00")]
Word = Annotated[str, _matching(r"[A-Za-z0-9_.,:+-]{0,200}", "letters, digits and _ . , : + - only")]
Constraint = Annotated[str, _matching(NODES, "an expression of node features, without spaces")]
Image = Annotated[str, _matching(IMAGE, "an image such as registry/distmm:1.0 or distmm@sha256:...")]
Namespace = Annotated[str, _matching(DNS_LABEL, "the name of a namespace: at most 63 lower-case letters, digits and -")]
DnsLabelOrNone = Annotated[str, _matching(f"|{DNS_LABEL}", "a name of at most 63 lower-case letters, digits and -")]
ObjectOrNone = Annotated[str, _matching(f"|{OBJECT}", "a name of lower-case letters, digits, - and .")]
Label = Annotated[str, _matching(f"|{LABEL_KEY}={LABEL_VALUE}", "a label such as pool=gpu")]
Labels = Annotated[dict[str, str], _check(_are_pairs(re.compile(LABEL_VALUE).fullmatch, OWN_LABELS), LABELS_RULE)]
Annotations = Annotated[dict[str, str], _check(_are_pairs(str.isprintable, LOST_ANNOTATIONS), ANNOTATIONS_RULE)]
Resource = Annotated[str, _matching(RESOURCE, "the name of an extended resource, such as nvidia.com/gpu")]
ResourceOrNone = Annotated[
    str, _matching(f"|{RESOURCE}", "the name of an extended resource, such as rdma/hca_shared_devices_a")
]
Endpoint = Annotated[
    str, _check(_is_endpoint, "a URL of http or https with a host and, if it is not the usual one, a port")
]
Kernel = Annotated[str, _matching(r"[a-z0-9_]{0,40}", "the name of a kernel, as distmm info lists them")]
Blocks = Annotated[str, _matching(rf"|{EDGE}(x{EDGE}x{EDGE})?", "edges such as 8192 or 8192x4096x8192")]
Plan = Annotated[str, _matching(PLAN, "a plan as distmm plan says it, such as g2x1x1 b8192x8192x8192 p1 w1 l2")]
Interface = Annotated[str, _matching(r"[A-Za-z0-9_.-]{0,15}", "a network interface such as ib0")]
