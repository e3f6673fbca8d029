"""Which replicas of blocks are made and dropped, decided without a scheduler."""

from __future__ import annotations

from distmm.scheduler.replicas import Replicas

BLOCK = ("A", 0, 0)


def test_one_copy_of_a_block_stays_when_its_home_has_died() -> None:
    replicas = Replicas()
    replicas.home[BLOCK] = 2  # which has died
    for rank in (0, 1):
        replicas.use(BLOCK, rank)
        replicas.used([BLOCK], rank)  # both replicas have been read for the last time
    assert replicas.drops(lambda block: {0, 1}) == [(BLOCK, 0)]
    assert replicas.drops(lambda block: {0, 1}) == []


def test_the_home_keeps_its_copy_and_others_drop_theirs_after_the_last_use() -> None:
    replicas = Replicas()
    replicas.home[BLOCK] = 0
    for rank in (0, 1, 1):
        replicas.use(BLOCK, rank)
    replicas.used([BLOCK], 1)
    assert replicas.drops(lambda block: {0, 1}) == []
    replicas.used([BLOCK], 0)
    replicas.used([BLOCK], 1)
    assert replicas.drops(lambda block: {0, 1}) == [(BLOCK, 1)]
    assert not replicas.uses


def test_a_replica_that_is_planned_again_stays() -> None:
    replicas = Replicas()
    replicas.home[BLOCK] = 0
    replicas.use(BLOCK, 1)
    replicas.used([BLOCK], 1)
    replicas.use(BLOCK, 1)
    assert replicas.drops(lambda block: {0, 1}) == []


def test_a_block_is_copied_once_it_is_in_memory_to_those_who_lack_it() -> None:
    replicas = Replicas()
    for rank in (0, 1, 2):
        replicas.use(BLOCK, rank)
    replicas.use(BLOCK, 3)
    replicas.want([(BLOCK, rank) for rank in (0, 1, 2, 3)])
    assert replicas.copies([BLOCK], lambda block: ()) == []  # not in memory yet
    replicas.used([BLOCK], 3)  # the task was given up
    assert sorted(replicas.copies([BLOCK], lambda block: {0})) == [(BLOCK, 1), (BLOCK, 2)]
    assert replicas.copies([BLOCK], lambda block: {0}) == []
