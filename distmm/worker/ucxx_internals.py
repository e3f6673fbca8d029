"""Functions of UCXX that distmm replaces, private ones among them: here and nowhere else.

If UCXX has changed them, they are left as they are: transfers wait for products. The tests
(``tests/distmm/worker/test_ucxx_internals.py``) fail first for versions that are not in `VERSIONS_SEEN`.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

# Versions with which `wait_for_default_stream_only` has been measured.
VERSIONS_SEEN = {"distributed-ucxx": ("0.52.",), "ucxx": ("0.52.",), "UCX": ("1.21.",)}


def wait_for_default_stream_only() -> None:
    """Let transfers of distributed-ucxx wait for the default stream, and not for the whole GPU.

    Before each send and receive distributed-ucxx 0.52 calls ``ucxx._cuda_context.synchronize_default_stream``, on the
    worker's event loop. Despite its name that is ``Device.sync()``, which waits for every stream: a block of 1 GiB
    takes as long as the product that runs at the same time (170 ms instead of 4), and the worker answers no
    message in this time. Waiting for the default stream is enough: what is sent is the result of a finished task, and a
    buffer that receives is ready when its allocation on the default stream is. The name is looked up at every call, so
    one assignment replaces the function. It holds for the whole process, the user's own transfers included.
    """
    try:
        import distributed_ucxx
        import ucxx
        import ucxx._cuda_context as context

        context.synchronize_default_stream  # noqa: B018  raises if there is none
        found = {
            "distributed-ucxx": str(distributed_ucxx.__version__),
            "ucxx": str(ucxx.__version__),
            "UCX": ".".join(map(str, ucxx.get_ucx_version())),
        }
    except (ImportError, AttributeError) as error:
        logger.warning("%s: distmm leaves UCXX as it is, and transfers may wait for products", error)
        return
    if not all(version.startswith(VERSIONS_SEEN[package]) for package, version in found.items()):
        logger.warning(
            "%s: distmm knows %s, and leaves them as they are: transfers may wait for products",
            ", ".join(f"{package} {version}" for package, version in found.items()),
            ", ".join(f"{package} {'x, '.join(versions)}x" for package, versions in VERSIONS_SEEN.items()),
        )
        return
    context.synchronize_default_stream = synchronize_default_stream


def synchronize_default_stream(device_id: int = 0) -> None:
    """Wait until the work on the default stream of a device is done."""
    import cupy

    with cupy.cuda.Device(device_id):
        cupy.cuda.Stream.null.synchronize()
