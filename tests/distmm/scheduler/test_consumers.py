"""How many blocks of C must be in memory at a time, for whatever reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from distmm.graph.placement import Key
from distmm.scheduler.output_slots import MadeBlock, most_at_a_time

Reads = dict[Key, set[Key]]  # task -> what it reads


def needed(blocks: Iterable[MadeBlock], reads: Reads) -> int:
    readers = defaultdict(set)
    for task, read in reads.items():
        for key in read:
            readers[key].add(task)
    return most_at_a_time(list(blocks), lambda key: readers[key], lambda key: reads.get(key, ()))


def column(waves: int, *, stays: bool = False) -> list[MadeBlock]:
    """One block a wave, all on one worker."""
    return [MadeBlock([("C", i)], i, {0}, stays) for i in range(waves)]


def test_blocks_that_are_read_one_by_one_need_one_slot() -> None:
    parts: Reads = {("part", i): {("C", i)} for i in range(5)}
    assert needed(column(5), parts | {("sum",): set(parts)}) == 1


def test_blocks_that_nobody_reads_need_one_slot() -> None:
    assert needed(column(3), {}) == 1


def test_a_task_that_reads_blocks_of_two_waves_keeps_the_first() -> None:
    assert needed(column(6), {("pair", i): {("C", 2 * i), ("C", 2 * i + 1)} for i in range(3)}) == 2
    assert needed(column(6), {("pair", i): {("C", i), ("C", 5 - i)} for i in range(3)}) == 4


def test_what_depends_on_a_later_block_by_other_tasks_keeps_a_block_too() -> None:
    centred: Reads = {("mean",): {("C", i) for i in range(4)}}
    centred |= {("part", i): {("C", i), ("mean",)} for i in range(4)}
    assert needed(column(4), centred) == 4


def test_blocks_that_stay_need_a_slot_each() -> None:
    assert needed(column(7, stays=True), {}) == 7


def test_blocks_that_are_read_where_they_are_made_need_one_slot_whoever_keeps_the_results() -> None:
    blocks = [block._replace(is_read=True) for block in column(4, stays=True)]
    assert needed(blocks, {("join",): {("C", i) for i in range(4)}}) == 1


def test_each_worker_is_counted_for_itself() -> None:
    blocks = [MadeBlock([("C", i)], i // 2, {i % 2}) for i in range(6)]
    assert needed(blocks, {("join",): {("C", i) for i in range(0, 6, 2)}}) == 3
    assert needed([block._replace(ranks={0, 1}) for block in blocks], {}) == 2


def test_a_block_and_its_mirror_image_share_a_slot_until_both_are_read() -> None:
    blocks = [MadeBlock([("C", i, 0), ("C", 0, i)], i, {0}) for i in range(1, 4)]
    mirrors: Reads = {("C", 0, i): {("C", i, 0)} for i in range(1, 4)}
    assert needed(blocks, mirrors) == 1
    assert needed(blocks, mirrors | {("row",): set(mirrors)}) == 3


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[MadeBlock], Reads]:
    count = draw(st.integers(1, 8))
    blocks = [
        MadeBlock(
            [("C", i)], draw(st.integers(0, 3)), {draw(st.integers(0, 1))}, draw(st.booleans()), draw(st.booleans())
        )
        for i in range(count)
    ]
    known: list[Key] = [("C", i) for i in range(count)] + [("other",)]
    reads: Reads = {}
    for i in range(draw(st.integers(0, 8))):
        reads["task", i] = draw(st.sets(st.sampled_from(known), min_size=1, max_size=3))
        known.append(("task", i))
    return blocks, reads


@given(graphs())
def test_with_so_many_slots_a_product_ends_and_with_fewer_it_does_not(graph: tuple[list[MadeBlock], Reads]) -> None:
    blocks, reads = graph
    slots = needed(blocks, reads)
    assert ends(blocks, reads, slots)
    assert not ends(blocks, reads, slots - 1)


def ends(blocks: list[MadeBlock], reads: Reads, slots: int) -> bool:
    """Make the blocks wave by wave, where there are slots; do at once what can be done."""
    done: set[Key] = {("other",)}
    held: set[int] = set()
    left = set(range(len(blocks)))
    while left:
        wave = min(blocks[i].wave for i in left)
        startable = [
            i for i in left if blocks[i].wave == wave and sum(blocks[i].ranks <= blocks[h].ranks for h in held) < slots
        ]
        if not startable:
            return False
        # All of a wave are in memory before any leaves: that is what slots are for.
        i = min(startable)
        left.discard(i)
        held.add(i)
        done |= set(blocks[i].keys)
        if any(blocks[j].wave == wave for j in left):
            continue
        while new := {task for task, read in reads.items() if task not in done and read <= done}:
            done |= new
        held = {
            h
            for h in held
            if not blocks[h].is_read
            and (blocks[h].stays or not all(t in done for t, read in reads.items() if read & set(blocks[h].keys)))
        }
    return True
