"""Ranks of workers that die, come back, and join."""

from __future__ import annotations

from distmm.scheduler.ranks import Ranks


def ranks(workers: int) -> Ranks:
    made = Ranks()
    for name in range(workers):
        assert made.join(f"tcp://{name}", name) is None
    return made


def test_a_restarted_worker_has_the_rank_that_it_had() -> None:
    made = ranks(3)
    made.leave("tcp://0")
    made.leave("tcp://1")
    assert made.join("tcp://1-again", 1) == "tcp://1"
    assert made.addresses == ["tcp://0", "tcp://1-again", "tcp://2"]


def test_a_worker_of_another_name_replaces_a_dead_one() -> None:
    made = ranks(3)
    made.leave("tcp://1")
    assert made.join("tcp://new", "new") == "tcp://1"
    assert made.addresses == ["tcp://0", "tcp://new", "tcp://2"]


def test_where_nobody_has_died_a_worker_gets_the_next_rank() -> None:
    made = ranks(2)
    assert made.join("tcp://new", "new") is None
    assert made.join("tcp://new", "new") is None  # said twice
    assert made.addresses == ["tcp://0", "tcp://1", "tcp://new"]


def test_between_products_the_living_are_counted_anew() -> None:
    made = ranks(3)
    made.leave("tcp://0")
    made.forget_dead()
    assert made.addresses == ["tcp://1", "tcp://2"]
    assert made.alive == {"tcp://1": 0, "tcp://2": 1}
    assert made.join("tcp://0-again", 0) is None  # its rank is gone


def test_where_all_have_died_their_replacements_inherit_all_ranks() -> None:
    made = ranks(2)
    for address in list(made.addresses):
        made.leave(address)
    made.forget_dead()
    assert [made.join(f"tcp://{name}-again", name) for name in (1, 0)] == ["tcp://1", "tcp://0"]
    assert made.addresses == ["tcp://0-again", "tcp://1-again"]
