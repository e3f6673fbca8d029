"""The client's arrays live as long as anything may read them, and no longer."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Scheduler, fire_and_forget, futures_of, wait

import distmm
from distmm.clusters import view
from distmm.errors import InputError
from distmm.transfer import ClientArray, loan_readers, loans
from tests.open_loans import open_loans
from tests.replaced_scheduler import replaceable
from tests.tables import later
from tests.until import until

N = 400  # float64 matrices of this size are not sent with the graph


def operands(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(-9, 9, (N, N)).astype("f8"), rng.integers(-9, 9, (N, N)).astype("f8")


def live(array: weakref.ref[Any]) -> bool:
    gc.collect()
    return array() is not None


@pytest.fixture
def current(client: Client) -> Iterator[Client]:
    until(lambda: gc.collect() >= 0 and not open_loans())
    with client.as_current():
        yield client


@pytest.mark.minutes
def test_a_persisted_product_keeps_what_an_earlier_computation_has_read(current: Client) -> None:
    a, b = operands()
    expected, array = a @ b, weakref.ref(a)
    C = distmm.matmul(a, b)
    del a, b
    np.testing.assert_array_equal(C.compute(), expected)
    np.testing.assert_array_equal(C[:10].compute(), expected[:10])
    C = C.persist()
    wait(C)
    current.run_on_scheduler(lambda: None)
    assert live(array)
    np.testing.assert_array_equal(C.compute(), expected)
    del C
    until(lambda: not live(array))


@pytest.mark.parametrize(
    "lazy",
    [distmm.matmul, lambda a, b: distmm.gram(a), lambda a, b: distmm.nearest(a, b, 3, "cosine"), distmm.tensordot],
    ids=["matmul", "gram", "nearest", "tensordot"],
)
def test_operands_are_freed_at_once_and_not_by_the_garbage_collector(lazy: Callable[..., Any]) -> None:
    a, b = operands()
    array = weakref.ref(a)
    gc.disable()
    try:
        C = lazy(a, b, 1) if lazy is distmm.tensordot else lazy(a, b)
        del a, b
        assert array() is not None
        del C
        assert array() is None
    finally:
        gc.enable()


@pytest.mark.minutes
def test_a_product_whose_graph_is_still_on_its_way_keeps_its_operands(current: Client) -> None:
    """A scheduler that is busy with something else has not seen the graph when the lazy array has gone."""
    for seed in range(2):
        a, b = operands(seed)
        expected, array = a @ b, weakref.ref(a)
        C = distmm.matmul(a, b)
        del a, b
        current.loop.add_callback(lambda: [sum(range(100_000)) for _ in range(10)])  # client and scheduler share a loop
        C = C.persist()
        assert live(array)
        np.testing.assert_array_equal(C.compute(), expected)
        del C
        until(lambda array=array: not live(array))  # type: ignore[misc]


def summed(P: da.Array, client: Client) -> Any:
    return P.sum().persist()


def submitted(P: da.Array, client: Client) -> Any:
    return client.submit(lambda *blocks: sum(float(block.sum()) for block in blocks), *futures_of(P))


def forgotten(P: da.Array, client: Client) -> Any:
    total = summed(P, client)
    fire_and_forget(total)
    return total.name, *[0] * total.ndim


@pytest.mark.parametrize("use", later([summed, submitted, forgotten]))
def test_operands_live_while_tasks_of_any_kind_still_need_them(
    current: Client, use: Callable[[da.Array, Client], Any], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"

    def closed(block: np.ndarray) -> np.ndarray:
        until(gate.exists)
        return block

    a, b = operands()
    expected, array = (a @ b).sum(), weakref.ref(a)
    B = da.from_array(b, chunks=N).map_blocks(closed, dtype="f8", meta=np.empty((0, 0)))
    C = distmm.matmul(a, B).persist()
    wanted = use(C, current)
    del a, C
    assert live(array)
    gate.touch()
    if not isinstance(wanted, tuple):
        assert float(wanted.result() if use is submitted else wanted.compute()) == expected
    del wanted
    until(lambda: not live(array))


def test_a_closed_client_handles_an_answer_that_was_on_its_way(current: Client) -> None:
    def read(dask_scheduler: Scheduler) -> None:
        loan_readers.install(dask_scheduler)
        dask_scheduler.plugins[loan_readers.LoanReaders.name].readers["distmm-client-1"] = 1

    current.run_on_scheduler(read)
    lent = np.zeros(N)
    array = weakref.ref(lent)
    with Client(current.scheduler.address) as other:
        other.loop.add_callback(loans._ask, other, "distmm-client-1", lent)
        del lent
        until(lambda: any(topic.startswith(loans.TOPIC) for topic in other._event_handlers))
        assert live(array)
    until(lambda: not live(array))
    assert any(topic.startswith(loans.TOPIC) for topic in other._event_handlers)


@pytest.mark.minutes
def test_pickled_products_keep_nothing_and_their_copies_do(current: Client) -> None:
    a, b = operands()
    expected, array = a @ b, weakref.ref(a)
    C = distmm.matmul(a, b)
    content = pickle.dumps(C)
    copy = pickle.loads(content)
    del a, b, C
    assert live(array)
    np.testing.assert_array_equal(copy.compute(), expected)
    del copy
    until(lambda: not live(array))
    with pytest.raises(InputError, match="has been freed"):
        pickle.loads(content)


def read(array: ClientArray) -> np.ndarray:
    return array[0:N, 0:N]


def test_a_copy_in_another_process_does_not_read_what_has_been_freed(current: Client) -> None:
    a, _ = operands()
    lent = a[:]  # its memory stays, so that it can be read
    content = pickle.dumps(ClientArray.of(lent, "lent-to-a-copy"))
    pid = next(iter(current.run(os.getpid)))  # a worker stands for another client
    np.testing.assert_array_equal(current.submit(lambda: read(pickle.loads(content)), workers=[pid]).result(), a)
    del lent
    until(lambda: not open_loans())
    with pytest.raises(InputError, match="has been freed"):
        current.submit(lambda: read(pickle.loads(content)), workers=[pid], pure=False).result()


def test_a_restart_of_the_cluster_ends_loans(current: Client) -> None:
    said: list[dict[str, Any]] = []
    comms = {"client": SimpleNamespace(send=said.append)}
    scheduler = SimpleNamespace(tasks={}, stream_handlers={"subscribe-topic": None}, client_comms=comms)
    readers = loan_readers.LoanReaders(scheduler)
    a, _ = operands()
    scheduler.tasks["task"] = SimpleNamespace(run_spec=[ClientArray.of(a, "lent")], state="released")
    readers.update_graph(scheduler, tasks=["task"])
    scheduler.stream_handlers["subscribe-topic"](topic=f"{loans.TOPIC}lent 1", client="client")
    assert not said
    readers.restart(scheduler)
    assert [event["topic"] for event in said] == [f"{loans.TOPIC}lent 1"]


def test_a_client_that_is_closed_keeps_nothing(current: Client) -> None:
    a, b = operands()
    array = weakref.ref(a)
    other = Client(current.scheduler.address, set_as_default=False)
    C = distmm.matmul(a, b, client=other)
    P = other.persist(C)
    wait(P)
    del a, b
    other.close()
    del P
    assert live(array)
    del C
    until(lambda: not live(array))


@pytest.mark.minutes
def test_a_product_may_be_computed_by_another_client(current: Client) -> None:
    a, b = operands()
    expected, array = a @ b, weakref.ref(a)
    with Client(current.scheduler.address, set_as_default=False) as other:
        P = current.persist(distmm.matmul(a, b, client=other))
    del a, b
    np.testing.assert_array_equal(P.compute(), expected)
    assert live(array)
    del P
    until(lambda: not live(array))


@pytest.mark.minutes
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_metrics_keep_nothing(current: Client, metric: Any) -> None:
    a, b = operands()
    arrays = [weakref.ref(a), weakref.ref(b)]
    found = distmm.nearest(a, b, 3, metric).compute()
    near = distmm.threshold(a, b, 0.9, metric=metric, transb=True) if metric == "cosine" else None
    del a, b, found, near
    until(lambda: not any(map(live, arrays)))


def test_a_question_is_answered_after_the_graphs_that_were_sent_before_it(current: Client) -> None:
    """Dask's scheduler handles a message of a client when it is done with the one before. Loans need that."""
    current.run_on_scheduler(loan_readers.install)
    future = current.submit(abs, -1, key="distmm-before-the-question")
    with pytest.MonkeyPatch.context() as patch:
        known: list[bool] = []

        def tell(scheduler: Scheduler, clients: list[str], topic: str) -> None:
            known.append("distmm-before-the-question" in scheduler.tasks)

        patch.setattr(loan_readers, "tell", tell)
        current.subscribe_topic(f"{loans.TOPIC}nothing 0", lambda _: None)
        until(lambda: known)
    assert known == [True]
    del future

    def topics(dask_scheduler: Scheduler) -> list[str]:
        return [topic for topic in dask_scheduler._broker._topics if topic.startswith(loans.TOPIC)]

    assert not current.run_on_scheduler(topics)


def test_the_scheduler_that_replaces_a_lost_one_is_asked_again() -> None:
    with replaceable() as (client, first, replace):
        view.ask(client)
        loan = loans.Loan("read-for-ever", np.zeros((N, N)))
        loan.send()
        readers = first.plugins[loan_readers.LoanReaders.name]
        readers.readers[loan.name] = 1
        del loan
        until(lambda: readers.asked)
        replace()
        until(lambda: "read-for-ever" not in open_loans())
