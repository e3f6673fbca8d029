"""Answers of the workers to a client's question: the scheduler asks all at the same time, and keeps what they said."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from distmm.transfer import process_memory

if TYPE_CHECKING:
    from distributed import Scheduler, Worker

logger = logging.getLogger(__name__)


async def ask_workers(
    scheduler: Scheduler,
    kept: dict[bytes, dict[str, Any]],
    question: bytes | None,
    proof: Any,
    seconds: float,
) -> tuple[dict[str, bool], dict[str, Any]]:
    """Ask all workers; return who reads the client's memory, and the answers.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    kept : dict
        Earlier answers, by question and address. New ones are added.
    question : bytes, optional
        A function of a worker and its arguments, pickled. None: workers say only whether they read the client's memory.
    proof : object
        As `distmm.transfer.process_memory.proof` returns it.
    seconds : float
        A worker that does not answer for so long is left out; what it said last counts.
    """
    from distributed.protocol.pickle import dumps

    message = {"op": "run", "function": dumps(_answer_of_worker), "args": dumps((question, proof)), "wait": True}
    found = await send(scheduler, message, seconds)
    reads = {address: answer["result"][0] for address, answer in found.items()}
    if question is None:
        return reads, {}
    answers = kept.get(question, {}) | {address: answer["result"][1] for address, answer in found.items()}
    kept[question] = {address: answer for address, answer in answers.items() if address in scheduler.workers}
    return reads, kept[question]


async def send(scheduler: Scheduler, message: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Send a message to all workers; return the answers of those that live and do answer. Errors in them are raised."""

    async def one(address: str) -> Any:
        try:
            sent = scheduler.broadcast(msg=message, workers=[address], on_error="return")
            answer = (await asyncio.wait_for(sent, seconds))[address]
        except TimeoutError:
            logger.warning("the worker at %s has not answered for %.0f s: is it stopped?", address, seconds)
            return None
        if isinstance(answer, BaseException):
            return None
        return {name: _deserialized(value) for name, value in answer.items()}

    addresses = list(scheduler.workers)
    answers = dict(zip(addresses, await asyncio.gather(*map(one, addresses)), strict=True))
    found = {address: answer for address, answer in answers.items() if answer is not None}
    for answer in found.values():
        if answer["status"] == "error":
            from distributed.core import clean_exception

            _, error, trace = clean_exception(answer["exception"], answer["traceback"])
            raise error.with_traceback(trace)
    return found


def _deserialized(value: Any) -> Any:
    """Return what a worker has sent: a scheduler leaves it to clients to deserialise answers."""
    from distributed.protocol import Serialize, Serialized, deserialize

    if isinstance(value, Serialized):
        return deserialize(value.header, value.frames)
    return value.data if isinstance(value, Serialize) else value


def _answer_of_worker(question: bytes | None, proof: Any, dask_worker: Worker) -> tuple[bool, Any]:
    """Return whether this worker reads the client's memory, and its answer to the question. Runs on workers."""
    from distributed.protocol.pickle import loads

    reads = process_memory.can_read(*proof)
    if question is None:
        return reads, None
    function, arguments = loads(question)
    return reads, function(*arguments, dask_worker)
