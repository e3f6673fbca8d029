from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.scheduler.lookahead import Lookahead


def orders(window: Lookahead) -> list[int]:
    return [key[-1] for held in window.open() for key in list(held.tasks)[:1]]


def filled(lookahead: int, steps: int, chains: int) -> Lookahead:
    window = Lookahead(lookahead)
    for step in range(steps):
        for chain in range(chains):
            window.add(step, (chain, step)).tasks[chain, step] = chain
    return window


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 5), st.randoms(use_true_random=False))
def test_no_step_opens_before_all_chains_have_done_the_step_that_is_a_lookahead_behind(
    lookahead: int, steps: int, chains: int, random: object
) -> None:
    window = filled(lookahead, steps, chains)
    done = dict.fromkeys(range(chains), 0)
    opened = set(orders(window))
    while any(step < steps for step in done.values()):
        able = [chain for chain, step in done.items() if step < steps and step in opened]
        assert able  # somebody may always go on
        chain = random.choice(able)  # type: ignore[attr-defined]
        last = window.finish(done[chain], (chain, done[chain]))
        done[chain] += 1
        assert last == (min(done.values()) >= done[chain])
        opened |= set(orders(window))
        assert max(opened) < min(*done.values(), steps) + lookahead
    assert opened == set(range(steps))


def test_a_task_that_is_done_twice_counts_once() -> None:
    window = filled(1, 2, 2)
    assert orders(window) == [0]
    assert not window.finish(0, (0, 0))
    assert not window.finish(0, (0, 0))
    assert orders(window) == []
    assert window.finish(0, (1, 0))
    assert orders(window) == [1]


def test_waves_that_come_later_wait_for_those_before() -> None:
    window = filled(2, 2, 1)
    assert orders(window) == [0, 1]
    window.add(2, ("next wave", 2)).tasks["next wave", 2] = 0
    assert orders(window) == []
    window.finish(0, (0, 0))
    assert orders(window) == [2]


@pytest.mark.parametrize("workers", [1, 6, 256])
def test_the_picture_of_a_plan_is_well_formed_and_names_owners(workers: int) -> None:
    problem = Problem(30_000, 200_000, 50_000, np.dtype("f4"))
    plan = make_plan(problem, ClusterSpec(workers, 10**11, "cuda", 2e14, 5e10))
    html = plan._repr_html_()
    picture = ET.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    titles = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert any(text.startswith("C[0, 0]: worker 0") for text in titles)
    assert str(plan) in html
