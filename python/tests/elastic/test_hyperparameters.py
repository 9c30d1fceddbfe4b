"""Values that depend on the number of workers."""

from __future__ import annotations

from typing import Any

import pytest
import steadfast
from steadfast import elastic
from threads import Threads


def test_hyperparameters_follow_the_number_of_workers():
    """S003-53: they are those of the current round, on old workers and new ones, whatever the state was saved with."""
    with Threads("a") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            @elastic.run(membership=membership)
            def train(state):
                # The state holds the rate of the round before.
                state.rate = elastic.scaled(0.1, workers=1)
                state.rates += [(elastic.world_size(), state.rate, elastic.by_workers({1: 64, 2: 32, 8: 4}))]
                if elastic.world_size() == 1:
                    state.commit()
                    workers.coordinator.add("b")
                    while True:
                        state.check_host_updates()
                return state.rates

            return train(elastic.ObjectState(rate=0.0, rates=[]))

        futures = workers.start(program, "a", "b")
        assert [it.result(60) for it in futures] == [[(1, 0.1, 64), (2, 0.2, 32)]] * 2


def with_workers(count: int, call: Any) -> Any:
    """Returns what the call returns in a round with so many workers."""

    class Some(elastic.SoloAgent):
        def assignment(self):
            return super().assignment()._replace(world_size=count)

    membership = elastic.Membership(Some(), lambda _: elastic.SoloGroup())
    return elastic.run(membership=membership)(lambda state: call())(elastic.ObjectState())


@pytest.mark.parametrize(("count", "value"), [(2, "a"), (3, "a"), (4, "b"), (9, "c"), (100, "c")])
def test_a_value_holds_up_to_the_next_number_of_workers(count, value):
    assert with_workers(count, lambda: elastic.by_workers({9: "c", 2: "a", 4: "b"})) == value


def test_a_value_is_scaled_linearly_or_by_the_square_root():
    """S003-53"""
    assert with_workers(8, lambda: elastic.scaled(0.1, workers=2)) == pytest.approx(0.4)
    assert with_workers(8, lambda: elastic.scaled(0.1, workers=2, rule="sqrt")) == pytest.approx(0.2)
    assert with_workers(1, lambda: elastic.scaled(0.1, workers=4, rule="sqrt")) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: elastic.by_workers({4: 1}), "no value for 3 workers: the smallest number is 4"),
        (lambda: elastic.by_workers({}), "no value for 3 workers: there is none"),
        (lambda: elastic.scaled(1.0, workers=0), "`workers` is 0"),
        (lambda: elastic.scaled(1.0, workers=1, rule="cubic"), '"linear" or "sqrt"'),
    ],
)
def test_a_number_of_workers_without_a_value_is_refused(call, message):
    with pytest.raises(steadfast.InvalidError, match=message):
        with_workers(3, call)
