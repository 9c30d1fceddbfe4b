"""How samples are divided while the number of workers changes."""

from __future__ import annotations

import functools
import random
from typing import Any, Dict, List, Optional, Sequence

import pytest
import steadfast
from steadfast import elastic
from steadfast.elastic._membership import CURRENT
from threads import Killed, Threads


class Workers:
    """The samplers of all workers of a job, whose steps are taken together."""

    def __init__(self, samples: int, world_size: int, **settings: Any) -> None:
        self._samples = samples
        self._settings = settings
        self._state: Optional[Dict[str, Any]] = None
        self.resize(world_size)

    def resize(self, world_size: int) -> None:
        state = self.samplers[0].state_dict() if hasattr(self, "samplers") else None
        self.samplers = [self._sampler(rank, world_size, state) for rank in range(world_size)]

    def set_epoch(self, epoch: int) -> None:
        for rank, sampler in enumerate(self.samplers):
            with_place(rank, len(self.samplers), functools.partial(sampler.set_epoch, epoch))

    def steps(self, batch_size: int, steps: int) -> List[List[int]]:
        """Takes steps; returns the samples of each, over all workers."""
        taken: List[List[int]] = [[] for _ in range(steps)]
        for sampler in self.samplers:
            batches = list(sampler.batches(batch_size))
            assert len(batches) == len(sampler.batches(batch_size))
            of_step = len(sampler._own_lanes())
            for index, batch in enumerate(batches[: steps * of_step]):
                taken[index // of_step] += batch
                sampler.record_batch(index, batch_size)
        assert len({it.processed_num for it in self.samplers}) == 1
        return taken

    def steps_left(self, batch_size: int) -> int:
        left = {it._steps(batch_size) for it in self.samplers}
        assert len(left) == 1
        return left.pop()

    def _sampler(self, rank: int, world_size: int, state: Optional[Dict[str, Any]]) -> elastic.ElasticSampler:
        def make() -> elastic.ElasticSampler:
            sampler = elastic.ElasticSampler(self._samples, **self._settings)
            if state is not None:
                sampler.load_state_dict(state)
            return sampler

        return with_place(rank, world_size, make)


def with_place(rank: int, world_size: int, function: Any) -> Any:
    agent = elastic.SoloAgent()
    agent.assignment = lambda: elastic.Assignment(  # type: ignore[method-assign]
        1, rank, 0, world_size, 1, rank, world_size, "", 0
    )
    token = CURRENT.set(elastic.Membership(agent))
    try:
        return function()
    finally:
        CURRENT.reset(token)


def test_two_workers_then_three_continue_at_the_next_sample():
    """S003-51: 2 iterators with 2 workers put the next index at 3; then 2 iterations with 3 workers start
    from 3 and end at 9.

    Samples are counted from 1. One step of 2 workers uses 1 and 2, the next is 3; two steps of 3 workers use
    3 to 8, and the next is 9.
    """
    workers = Workers(20, 2, shuffle=False)
    assert workers.steps(1, 1) == [[0, 1]]
    assert workers.samplers[0].processed_num + 1 == 3
    workers.resize(3)
    assert workers.steps(1, 2) == [[2, 3, 4], [5, 6, 7]]
    assert workers.samplers[0].processed_num + 1 == 9


@pytest.mark.parametrize("seed", range(20))
def test_no_sample_is_lost_or_used_twice(seed):
    """S001-42"""
    choose = random.Random(seed)
    samples, batch_size = choose.randint(1, 60), choose.randint(1, 5)
    lanes = choose.choice([None, 8])
    workers = Workers(samples, choose.randint(1, 8), seed=seed, lanes=lanes)
    used: List[int] = []
    while workers.steps_left(batch_size):
        for step in workers.steps(batch_size, choose.randint(1, 3)):
            used += step
        workers.resize(choose.randint(1, 8))
    assert sorted(used) == list(range(samples)), (seed, samples, batch_size, lanes)
    assert workers.samplers[0].processed_num == samples


@pytest.mark.parametrize("samples", [64, 61, 66, 3])
def test_with_fixed_lanes_a_step_uses_the_same_samples_on_any_number_of_workers(samples):
    """S002-8: as many steps, and as many samples in each, for n = 1, 2, 4, 8 and others."""

    def steps(world_size: int) -> List[List[int]]:
        workers = Workers(samples, world_size, lanes=8, seed=1)
        return [sorted(step) for step in workers.steps(2, workers.steps_left(2))]

    one = steps(1)
    assert [len(step) for step in one] == [16] * (samples // 16) + [samples % 16] * (samples % 16 > 0)
    for world_size in range(2, 9):
        assert steps(world_size) == one


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_last_step_whose_batches_are_not_all_full_can_be_left_out(lanes):
    """All workers leave out the same one, also those whose own batch would be full."""
    for samples in range(30):
        workers = Workers(samples, 3, lanes=lanes)
        of_step = 2 * (lanes or 3)
        for sampler in workers.samplers:
            batches = list(sampler.batches(2, drop_last=True))
            assert len(batches) == len(sampler.batches(2, drop_last=True))
            assert len(batches) == samples // of_step * len(sampler._own_lanes())
            assert all(len(it) == 2 for it in batches)


def test_an_interrupted_update_is_done_again():
    """A batch counts only once all batches of its update are done."""
    workers = Workers(24, 2, lanes=4, shuffle=False)
    sampler = workers.samplers[0]
    sampler.record_batch(0, 3)
    assert sampler.processed_num == 0
    sampler.record_batch(1, 3)
    assert sampler.processed_num == 12
    sampler.record_batch(2, 3)
    assert sampler.processed_num == 12


def test_plain_iteration_divides_all_samples():
    workers = Workers(10, 3, seed=7)
    parts = [list(it) for it in workers.samplers]
    assert [len(it) for it in workers.samplers] == [len(part) for part in parts] == [4, 3, 3]
    assert sorted(sum(parts, [])) == list(range(10))


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(epoch: int, **settings: Any) -> Sequence[int]:
        workers = Workers(50, 1, **settings)
        workers.set_epoch(epoch)
        return list(workers.samplers[0])

    assert order(3, seed=1) == order(3, seed=1)
    assert len({tuple(order(epoch, seed=seed)) for epoch in (0, 1) for seed in (0, 1, 2**32)}) == 6
    assert order(1, shuffle=False) == list(range(50))
    # The same on each machine and with each version of NumPy.
    assert order(0)[:5] == [34, 0, 3, 33, 38]


def test_an_epoch_that_was_begun_is_continued():
    workers = Workers(10, 1, shuffle=False)
    workers.steps(2, 2)
    workers.set_epoch(0)
    assert list(workers.samplers[0]) == [4, 5, 6, 7, 8, 9]
    workers.set_epoch(1)
    assert list(workers.samplers[0]) == list(range(10))


def test_too_few_lanes_are_refused():
    with pytest.raises(steadfast.InvalidError, match="2 lanes are too few for 3 workers"):
        Workers(10, 3, lanes=2)
    with pytest.raises(steadfast.InvalidError, match="`lanes` is 0; it is at least 1"):
        Workers(10, 3, lanes=0)
    with pytest.raises(steadfast.InvalidError, match="use `batches`"):
        iter(Workers(10, 1, lanes=2).samplers[0])


def test_each_update_has_as_many_batches_on_any_number_of_workers():
    """S002-8"""
    for lanes in (1, 3, 8, 10):
        for world_size in range(1, lanes + 1):
            steps = [elastic.accumulation_steps(rank, world_size, lanes) for rank in range(world_size)]
            assert sum(steps) == lanes
            assert max(steps) - min(steps) <= 1
            assert steps == sorted(steps, reverse=True)


def test_workers_that_come_and_die_use_each_sample_once_in_what_remains():
    """The sampler in a state, through failures and changes: samples after the last commit are used again, and
    only they."""
    with Threads("a", "b") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            token = CURRENT.set(membership)
            sampler = elastic.ElasticSampler(40, seed=3)
            CURRENT.reset(token)

            @elastic.run(membership=membership)
            def train(state):
                for index, batch in enumerate(state.sampler.batches(2)):
                    used = sum(elastic.group().exchange(batch), [])
                    state.used = state.used + used
                    state.sampler.record_batch(index, 2)
                    if member == "b" and len(state.used) == 24:
                        raise Killed
                    if member == "a" and len(state.used) == 12:
                        workers.coordinator.add("c")
                    if len(state.used) % 8 == 0:
                        state.commit()
                    else:
                        state.check_host_updates()
                return sorted(state.used), elastic.assignment().world_size

            return train(elastic.ObjectState(sampler=sampler, used=[]))

        every = list(range(40))
        assert workers.run(program, "a", "b", "c") == [(every, 2), None, (every, 2)]


def test_a_position_in_another_order_is_refused():
    """A sampler that went on with another seed would use some samples twice, and others never."""
    first = elastic.ElasticSampler(10, seed=3)
    list(first.batches(2))
    first.record_batch(0, 2)
    state = first.state_dict()
    for settings, message in [
        ({"seed": 4}, "10 samples with the seed 3, and here are 10 samples with the seed 4"),
        ({"seed": 3, "shuffle": False}, "and here are 10 samples with `shuffle=False`"),
    ]:
        with pytest.raises(steadfast.InvalidError, match=message):
            elastic.ElasticSampler(10, **settings).load_state_dict(state)
    with pytest.raises(steadfast.InvalidError, match="and here are 12 samples"):
        elastic.ElasticSampler(12, seed=3).load_state_dict(state)
    # States of before, and those of the beginning of an epoch.
    elastic.ElasticSampler(10, seed=4).load_state_dict({"epoch": 1, "processed_num": 2})
    elastic.ElasticSampler(12, seed=4).load_state_dict({**state, "processed_num": 0})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda number: {"seed": number}, "different `seed`: 0 and 1; pass all of them the same"),
        (lambda number: {"shuffle": number == 1}, "different `shuffle`: False and True"),
        (lambda number: {"lanes": 2 + number}, "different `lanes`: 2 and 3"),
        (lambda number: {"data": 7 + number}, "different numbers of samples: 7 and 8; give all of them the same"),
    ],
)
def test_samplers_that_differ_between_workers_are_refused(settings, message):
    """Each worker would deal samples in an order of its own: some would be used twice, and others never."""
    members = ["a", "b"]
    with Threads(*members) as workers:

        def program(member: str, membership: elastic.Membership) -> str:
            given = {"data": 7, "lanes": 2, **settings(members.index(member))}
            state = elastic.ObjectState(sampler=elastic.ElasticSampler(**given))
            with pytest.raises(steadfast.InvalidError) as caught:
                elastic.run(membership=membership)(lambda state: None)(state)
            return str(caught.value)

        for said in workers.run(program, *members):
            assert said.startswith("workers have made their `sampler` with ") and message in said
