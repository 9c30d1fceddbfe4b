"""Datasets whose records a service deals to the workers."""

from __future__ import annotations

import itertools
import sys
from typing import Any, List

import pytest
import steadfast
from steadfast import elastic
from steadfast.data import DataShardService, ElasticDataset
from steadfast.elastic._membership import CURRENT
from threads import Killed, Threads

torch_data = pytest.importorskip("torch.utils.data")


def test_the_same_class_runs_with_a_service_and_without():
    """S002-2: with a service `__len__` is `sys.maxsize`, and the index is ignored."""

    class Squares(ElasticDataset):
        def read_sample(self, index: int) -> int:
            return self.data[index] ** 2

    local = Squares(range(5))
    assert (len(local), [local[index] for index in range(5)]) == (5, [0, 1, 4, 9, 16])
    served = Squares(range(5), DataShardService(5, shuffle=False))
    assert len(served) == sys.maxsize
    assert [served[7] for _ in range(7)] == [0, 1, 4, 9, 16, 0, 1]
    assert served.data_shard_service.epoch == 1


def test_a_loader_goes_from_pass_to_pass():
    """S002-2"""
    service = DataShardService(10, seed=2)
    loader = torch_data.DataLoader(ElasticDataset(range(10), service), batch_size=4)
    batches = [batch.tolist() for batch in itertools.islice(loader, 5)]
    used = sum(batches, [])
    assert sorted(used[:10]) == sorted(used[10:]) == list(range(10)) and used[:10] != used[10:]


def test_the_order_is_that_of_the_sampler():
    service, sampler = DataShardService(9, seed=5), elastic.ElasticSampler(9, seed=5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert [service.fetch_record_index() for _ in range(9)] == list(sampler)


def trained(service: DataShardService, state: Any, updates: int, batch: int) -> None:
    while state.updates < updates:
        used = [service.fetch_record_index() for _ in range(batch)]
        for place in range(elastic.world_size()):
            data = elastic.group().broadcast_bytes(bytes(used), place)
            state.used += list(bytes(data))
        state.updates += 1
        state.commit()


def test_no_record_is_lost_or_used_twice_when_workers_die_and_come():
    """S002-2, S002-3, S002-9"""
    with Threads("a", "b", "c") as workers:

        def program(member: str, membership: elastic.Membership) -> List[int]:
            CURRENT.set(membership)
            service = DataShardService(7, seed=1)
            state = elastic.ObjectState(service=service, used=[], updates=0)

            @elastic.run(membership=membership)
            def train(state: Any) -> None:
                trained(service, state, 3, 2)
                if member == "c":
                    service.fetch_record_index()
                    raise Killed
                trained(service, state, 10, 2)

            train(state)
            return state.used

        found = workers.run(program, "a", "b", "c")
    used = found[0]
    assert used == found[1]
    # Three updates of three workers, and seven of two, with two records each.
    assert len(used) == 3 * 3 * 2 + 7 * 2 * 2
    # After each update, a pass has used each record once or not yet.
    for end in [*range(6, 18, 6), *range(18, len(used) + 1, 4)]:
        counts = [used[:end].count(record) for record in range(7)]
        assert max(counts) - min(counts) <= 1, (end, used)


def test_a_state_keeps_the_place_and_the_order():
    service = DataShardService(10, seed=2)
    first = [service.fetch_record_index() for _ in range(13)]
    again = DataShardService(10, seed=2)
    again.load_state_dict(service.state_dict())
    assert sorted(first[10:] + [again.fetch_record_index() for _ in range(7)]) == list(range(10))
    with pytest.raises(steadfast.InvalidError, match="with the seed 2, and here are 10 samples with the seed 3"):
        DataShardService(10, seed=3).load_state_dict(service.state_dict())
    assert service.position(10) == (1, 3, 13)
    with pytest.raises(steadfast.InvalidError, match="has 10 records, and the job `records = 11`"):
        service.position(11)
    with pytest.raises(steadfast.InvalidError, match="no records"):
        DataShardService(0)


def test_a_loader_that_reads_ahead_is_refused():
    """Records that its processes have read, and no update has used, would be lost."""
    loader = torch_data.DataLoader(ElasticDataset(range(10), DataShardService(10)), num_workers=1)
    with pytest.raises(steadfast.InvalidError, match="use `ElasticSampler.batches`"):
        next(iter(loader))
