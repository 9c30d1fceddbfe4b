"""The loop of rounds, on workers that are threads."""

from __future__ import annotations

import functools
import operator
import os
from typing import Any, List

import numpy as np
import pytest
import steadfast
from steadfast import elastic
from threads import Killed, Threads


def test_all_ranks_are_interrupted_at_the_same_step_whoever_learns_first():
    """S001-31, S001-32: the rank that knows need not be rank 0."""
    with Threads("a", "b", "c") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            steps: List[int] = []

            @elastic.run(membership=membership)
            def train(state):
                while state.step < 20:
                    state.step += 1
                    if member == "c" and state.step == 7 and state.rounds == 0:
                        # Others may see it at this step or the next.
                        workers.coordinator.add("d")
                    try:
                        state.check_host_updates()
                    except elastic.HostsUpdatedInterrupt:
                        steps.append(state.step)
                        state.rounds += 1
                        raise
                return steps, elastic.assignment().world_size

            return train(elastic.ObjectState(step=0, rounds=0))

        futures = workers.start(program, "a", "b", "c")
        futures += workers.start(program, "d")
        results = [it.result(60) for it in futures]
        assert results == [([7], 4)] * 3 + [([], 4)]


def test_a_state_is_never_torn():
    """S001-36, H1: after a notice in the middle of two commits, weights and counters are of the same
    moment.
    """
    with Threads("a") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            @elastic.run(membership=membership)
            def train(state):
                assert state.weights[0] == state.batch
                while state.batch < 12:
                    state.weights += 1
                    state.batch += 1
                    if state.batch == 4:
                        state.commit()
                    if state.batch == 9 and member == "a":
                        workers.coordinator.add("b")
                    state.check_host_updates()
                return state.weights[0], state.batch, elastic.assignment().world_size

            return train(elastic.ObjectState(weights=np.zeros(1), batch=0))

        futures = workers.start(program, "a", "b")
        assert [it.result(60) for it in futures] == [(12, 12, 2)] * 2


def test_two_changes_in_a_row_are_both_seen():
    """S001-25, H2: changes are told apart by revision, not by a clock."""
    agent = Changing()
    membership = elastic.Membership(agent, lambda _: elastic.SoloGroup())
    agent.bits = [2]
    with pytest.raises(elastic.HostsUpdatedInterrupt) as first:
        membership.check_updates()
    membership.check_updates()
    agent.bits += [1]
    with pytest.raises(elastic.HostsUpdatedInterrupt) as second:
        membership.check_updates()
    assert [first.value.skip_sync, second.value.skip_sync] == [False, True]
    agent.bits += [1, 2]
    with pytest.raises(elastic.HostsUpdatedInterrupt) as both:
        membership.check_updates()
    assert not both.value.skip_sync
    membership.check_updates()


def test_each_listener_hears_of_changes_before_the_state_does():
    """S001-22: several listeners, each of which is removed on its own."""
    agent = Changing()
    heard = []

    def once(added, removed):
        heard.append(("once", added, removed))
        elastic.remove_listener(once)

    def always(added, removed):
        heard.append(("always", added, removed))

    def train(state):
        elastic.register_listener(once)
        elastic.register_listener(always)
        for bits in ([2], [2, 1], [2, 1, 1]):
            agent.bits = bits
            with pytest.raises(elastic.HostsUpdatedInterrupt):
                state.check_host_updates()
        elastic.remove_listener(always)
        agent.bits = [2, 1, 1, 2]
        with pytest.raises(elastic.HostsUpdatedInterrupt):
            state.check_host_updates()
        with pytest.raises(ValueError):
            elastic.remove_listener(once)

    membership = elastic.Membership(agent, lambda _: elastic.SoloGroup())
    elastic.run(membership=membership)(train)(elastic.ObjectState())
    added, removed = (True, False), (False, True)
    first, second = heard[0][1:], heard[2][1:]
    assert {first, second} == {added, removed}
    assert heard == [("once", *first), ("always", *first), ("always", *second), ("always", *second)]


def test_functions_that_are_registered_in_each_round_do_not_pile_up():
    """S001-22, S001-33: Horovod's #2285. The training function is called in each round, and adds them again."""
    agent = Changing()
    heard: List[Any] = []

    def outside() -> None:
        heard.append("outside")

    def train(state):
        heard.append(agent._round)
        state.register_reset_callbacks([outside, lambda: heard.append("reset")])
        elastic.register_listener(lambda *_: heard.append("changed"))
        elastic.register_listener(always)
        elastic.register_listener(always)
        if agent._round < 3:
            agent.bits = agent.bits + [1]
            state.commit()

    def always(*_: bool) -> None:
        heard.append("always")

    state = elastic.ObjectState()
    state.register_reset_callbacks([outside])
    membership = elastic.Membership(agent, lambda _: elastic.SoloGroup())
    elastic.run(membership=membership)(train)(state)
    each = ["changed", "always", "outside", "reset"]
    assert heard == [0, *each, 1, *each, 2, *each, 3]
    # What belongs to the training function has ended with it.
    del heard[:]
    state.on_reset()
    assert heard == ["outside"]
    with pytest.raises(ValueError):
        membership.remove_listener(always)


def test_a_method_that_is_registered_twice_is_called_once():
    class Schedule:
        calls = 0

        def rescale(self) -> None:
            self.calls += 1

    schedule, state = Schedule(), elastic.ObjectState()
    state.register_reset_callbacks([schedule.rescale])
    state.register_reset_callbacks([schedule.rescale, Schedule().rescale])
    state.on_reset()
    assert schedule.calls == 1


def test_a_callback_is_called_again_until_a_round_is_formed():
    """S001-33: the training function has not begun again, so what it has registered is still there."""
    agent = Changing()
    calls: List[int] = []
    groups: List[int] = []

    class Failing(elastic.SoloGroup):
        def max(self, values):
            if agent._round == 1:
                raise elastic.CollectiveError("again")
            return super().max(values)

    def train(state):
        groups.append(agent._round)
        state.register_reset_callbacks([lambda: calls.append(agent._round)])
        if agent._round == 0:
            agent.bits = [1]
            state.commit()

    elastic.run(membership=elastic.Membership(agent, lambda _: Failing()))(train)(elastic.ObjectState())
    assert groups == [0, 2] and calls == [1, 2]


def test_a_commit_saves_the_state_and_then_handles_what_was_noticed():
    """S001-23, S001-30: a notice waits until the program asks; a commit has saved the state by then."""
    agent = Changing()

    def train(state):
        agent.bits = [2]
        state.step = 1
        with pytest.raises(elastic.HostsUpdatedInterrupt):
            state.commit()
        state.step = 2
        state.restore()
        return state.step

    membership = elastic.Membership(agent, lambda _: elastic.SoloGroup())
    assert elastic.run(membership=membership)(train)(elastic.ObjectState(step=0)) == 1


def test_a_check_between_two_commits_saves_nothing():
    """S001-40: the program chooses how often it commits, and may check at each batch."""

    def train(state):
        state.step = 1
        state.commit()
        state.step = 2
        state.check_host_updates()
        state.restore()
        return state.step

    membership = elastic.Membership(elastic.SoloAgent(), lambda _: elastic.SoloGroup())
    assert elastic.run(membership=membership)(train)(elastic.ObjectState(step=0)) == 1


class Changing(elastic.SoloAgent):
    """An agent that tells of the changes in ``bits``; their revisions are 1, 2, ..."""

    bits: List[int] = []

    def changes(self, since):
        return len(self.bits), functools.reduce(operator.or_, self.bits[since:], 0)

    def is_over(self, round):
        return bool(self.bits)


def test_the_state_is_not_sent_if_members_were_only_removed():
    """S001-31, S001-39: nothing is sent and nothing is lost."""
    with Threads("a", "b", "c") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            synced: List[int] = []

            class State(elastic.ObjectState):
                def sync(self) -> None:
                    synced.append(self.step)
                    super().sync()

            @elastic.run(membership=membership)
            def train(state):
                while state.step < 10:
                    state.step += 1
                    if member == "c" and state.step == 5:
                        workers.coordinator.remove("c")
                    state.check_host_updates()
                return synced, elastic.assignment().world_size

            return train(State(step=0))

        *stayed, removed = workers.start(program, "a", "b", "c")
        assert [it.result(60) for it in stayed] == [([0], 2)] * 2
        with pytest.raises(TimeoutError, match="c was removed"):
            removed.result(60)


def test_a_new_worker_gets_the_state_even_if_others_could_skip_it():
    """Horovod's #3494: a member is removed, and another one is added before the next round is formed."""
    with Threads("a", "b") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            @elastic.run(membership=membership)
            def train(state):
                while state.step < 10:
                    state.step += 1
                    if member == "b" and state.step == 5:
                        workers.coordinator.remove("b")
                    try:
                        state.check_host_updates()
                    except elastic.HostsUpdatedInterrupt as interrupt:
                        assert interrupt.skip_sync
                        if member == "a":
                            workers.coordinator.add("c")
                        raise
                return state.step, state.weights, elastic.assignment().world_size

            return train(elastic.ObjectState(step=0, weights={"a": 1}.get(member, 9)))

        one, removed, new = workers.start(program, "a", "b", "c")
        assert one.result(60) == new.result(60) == (10, 1, 2)
        assert isinstance(removed.exception(60), TimeoutError)


def test_callbacks_are_called_in_the_new_group_and_before_the_state_is_sent():
    """S001-33, S001-34, S003-53: a program asks for the current number of workers, and sets what depends
    on it.
    """
    with Threads("a") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            events: List[Any] = []

            class State(elastic.ObjectState):
                def sync(self) -> None:
                    events.append("sync")
                    super().sync()

                def reset(self) -> None:
                    events.append("reset")

            def rescale() -> None:
                world_size = elastic.assignment().world_size
                # Another worker answers only once it has formed the group.
                state.rate = 0.1 * world_size
                events.append(world_size)

            @elastic.run(membership=membership)
            def train(state):
                if elastic.assignment().world_size == 1:
                    workers.coordinator.add("b")
                    state.commit()
                return events, state.rate

            state = State(rate=0.1)
            state.register_reset_callbacks([rescale, lambda: events.append("last")])
            return train(state)

        one, new = (it.result(60) for it in workers.start(program, "a", "b"))
        assert one == (["sync", "reset", 2, "last", "sync"], 0.2)
        assert new == (["sync"], 0.2)


def test_a_worker_that_dies_within_an_update_leaves_no_half_of_it():
    """S001-38: the others go back to the last commit, and train on without it."""
    with Threads("a", "b", "c") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            @elastic.run(membership=membership)
            def train(state):
                while state.step < 10:
                    if state.step == 6 and member == "c":
                        raise Killed
                    # The first half of the update is done when the second fails.
                    state.weights[0] += sum(elastic.group().exchange(1)) // elastic.assignment().world_size
                    state.step += 1
                    state.weights[1] += 1
                    if state.step % 4 == 0:
                        state.commit()
                return state.weights.tolist(), elastic.assignment().world_size

            return train(elastic.ObjectState(weights=np.zeros(2), step=0))

        assert workers.run(program, "a", "b", "c") == [([10, 10], 2), ([10, 10], 2), None]


def test_a_worker_that_dies_while_the_state_is_sent_costs_the_others_nothing():
    """S001-39: after a notice the state of that moment is kept, even if a worker fails before the next round
    trains.
    """
    with Threads("a", "b") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            class State(elastic.ObjectState):
                def sync(self) -> None:
                    if member == "a" and self.step:
                        # It has the state to send: the others wait for it.
                        elastic.group().max([self._number * 3 + 2])
                        raise Killed
                    super().sync()

            steps: List[int] = []

            @elastic.run(membership=membership)
            def train(state):
                steps.append(state.step)
                while state.step < 10:
                    state.step += 1
                    if member == "a" and state.step == 7:
                        workers.coordinator.add("c")
                    if state.step == 4:
                        state.commit()
                    state.check_host_updates()
                return steps

            return train(State(step=0))

        assert workers.run(program, "a", "b", "c") == [None, [0, 7], [7]]


def test_the_newest_commit_wins_wherever_it_is():
    """The oldest worker is new itself after a restart; its agent, or another worker, has the last commit."""
    with Threads("a", "b", "c") as workers:
        for member, number in [("b", 7), ("c", 7), ("a", 5)]:
            kept = elastic.ObjectState(step=number, of=member)
            workers.coordinator.commits[member] = (number, bytes(kept._saved))

        def program(member: str, membership: elastic.Membership) -> Any:
            @elastic.run(membership=membership)
            def train(state):
                return state.step, state.of

            return train(elastic.ObjectState(step=0, of=member))

        assert workers.run(program, "a", "b", "c") == [(7, "b")] * 3
        assert {number for number, _ in workers.coordinator.commits.values()} == {8}


def test_a_commit_of_another_program_is_refused():
    with Threads("a") as workers:
        workers.coordinator.commits["a"] = (3, bytes(elastic.ObjectState(other=1)._saved))
        train = elastic.run(membership=workers.membership("a"))(lambda state: None)
        with pytest.raises(steadfast.InvalidError, match="has the attributes other; this one has step"):
            train(elastic.ObjectState(step=0))


@pytest.mark.parametrize("exchanges", [0, 1])
def test_a_failure_of_the_first_exchanges_keeps_what_the_program_has_prepared(exchanges):
    """What a program loads after the state was made, such as a checkpoint, is not lost with a worker."""
    with Threads("a", "b") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            if member == "b":
                group = membership.group
                for _ in range(exchanges):
                    group.max([1])
                raise Killed
            state = elastic.ObjectState(step=0)
            state.step = 100
            return elastic.run(membership=membership)(lambda state: state.step)(state)

        assert workers.run(program, "a", "b") == [100, None]


def test_a_state_that_is_ahead_of_its_commit_wins_over_the_commit():
    """S001-39: also if the worker with the commit, which was started again, has the lowest rank."""
    with Threads("a", "b") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            begins: List[int] = []

            @elastic.run(membership=membership)
            def train(state):
                begins.append(state.step)
                while state.step < 10:
                    state.step += 1
                    if member == "a" and state.step == 7:
                        workers.coordinator.remove("b")
                        workers.coordinator.add("b/2", rank=0)
                    if state.step == 4:
                        state.commit()
                    state.check_host_updates()
                return begins, elastic.assignment().rank

            return train(elastic.ObjectState(step=0))

        kept, removed, again = workers.start(program, "a", "b", "b/2")
        assert kept.result(60) == ([0, 7], 1)
        assert again.result(60) == ([7], 0)
        assert isinstance(removed.exception(60), TimeoutError)


def test_an_error_of_the_program_passes_unchanged():
    """S001-37: and the others need not wait until a time runs out."""
    with Threads("a", "b") as workers:
        error = ValueError("mine")

        def program(member: str, membership: elastic.Membership) -> Any:
            @elastic.run(membership=membership)
            def train(state):
                if member == "b" and state.step == 0:
                    raise error
                state.step += sum(elastic.group().exchange(1))
                return state.step

            try:
                return train(elastic.ObjectState(step=0))
            finally:
                if member == "b":
                    workers.coordinator.remove("b")

        one, failed = workers.start(program, "a", "b")
        assert failed.exception(60) is error
        assert one.result(60) == 1


@pytest.mark.parametrize(
    "error",
    [
        ValueError("gloo"),
        RuntimeError("shapes differ"),
        RuntimeError("Distributed package doesn't have NCCL built in"),
        OSError("Connection reset"),
        KeyError(1),
    ],
)
def test_errors_that_are_not_of_the_group_are_not_taken_for_its_failures(error):
    state = elastic.ObjectState(step=0)

    @elastic.run(membership=alone())
    def train(state):
        state.step = 5
        raise error

    with pytest.raises(type(error)) as raised:
        train(state)
    assert raised.value is error
    assert state.step == 5


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_error_of_a_common_type_is_one_of_the_program_unless_the_agent_knows_of_a_loss(is_lost, caplog):
    """gloo raises RuntimeError; whether a worker was lost is the agent's to know. The traceback is shown."""
    agent = Changing()
    agent.assignment = lambda: elastic.Assignment(agent._round, 0, 0, 2, 1, 0, 2, "127.0.0.1", 0)
    error = RuntimeError("the first dimension of the tensors differs")

    @elastic.run(membership=elastic.Membership(agent, lambda _: elastic.SoloGroup()))
    def train(state):
        if agent._round == 1:
            return state.step
        if is_lost:
            agent.bits = [1]
        state.step = 5
        raise error

    if is_lost:
        assert train(elastic.ObjectState(step=0)) == 0
    else:
        with pytest.raises(RuntimeError) as raised:
            train(elastic.ObjectState(step=0))
        assert raised.value is error
    assert "Traceback" in caplog.text and "the first dimension" in caplog.text


@pytest.mark.parametrize("is_listener", [True, False])
def test_an_error_of_a_callback_is_one_of_the_program_though_members_have_changed(is_listener):
    """S001-33, S001-37: the agent knows of a change whenever callbacks are called, so it says nothing about an error."""
    agent = Changing()
    agent.assignment = lambda: elastic.Assignment(agent._round, 0, 0, 2, 1, 0, 2, "127.0.0.1", 0)
    error = RuntimeError("mine")
    calls: List[int] = []

    def callback(*_: bool) -> None:
        calls.append(agent._round)
        raise error

    @elastic.run(membership=elastic.Membership(agent, lambda _: elastic.SoloGroup()), reset_limit=5)
    def train(state):
        if is_listener:
            elastic.register_listener(callback)
        agent.bits = [1]
        state.commit()

    state = elastic.ObjectState(step=0)
    if not is_listener:
        state.register_reset_callbacks([callback])
    with pytest.raises(RuntimeError) as raised:
        train(state)
    assert raised.value is error and len(calls) == 1


def test_a_failed_operation_within_a_callback_is_one_of_the_group():
    """S001-33: callbacks may use the group, and a worker may be lost meanwhile."""
    agent = Changing()
    calls: List[int] = []

    def callback() -> None:
        calls.append(agent._round)
        if len(calls) == 1:
            raise elastic.WorkerLost("a worker has left")

    @elastic.run(membership=elastic.Membership(agent, lambda _: elastic.SoloGroup()))
    def train(state):
        if agent._round < 2:
            agent.bits = [1]
            state.commit()
        return agent._round

    state = elastic.ObjectState()
    state.register_reset_callbacks([callback])
    assert train(state) == 2 and calls == [1, 2]


def test_resets_are_bounded():
    """S001-12: `reset_limit`."""
    calls: List[int] = []

    @elastic.run(membership=alone(), reset_limit=3)
    def train(state):
        calls.append(1)
        raise elastic.CollectiveError("again")

    with pytest.raises(elastic.ResetLimitError, match="3 times"):
        train(elastic.ObjectState())
    assert len(calls) == 4


def test_a_round_that_is_not_formed_names_who_is_waited_for():
    """S001-12: `elastic_timeout`."""
    with Threads("a", "b") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            @elastic.run(membership=membership, timeout=0.05)
            def train(state):
                if member == "b":
                    return
                elastic.group().exchange(1)

            train(elastic.ObjectState())
            membership.close()

        one, _ = workers.start(program, "a", "b")
        assert "waiting for b" in str(one.exception(60))


def test_a_state_of_ones_own_needs_three_methods():
    """S001-41"""

    class Counter(elastic.State):
        def __init__(self) -> None:
            super().__init__()
            self.value = self.saved = 0

        def save(self) -> None:
            self.saved = self.value

        def restore(self) -> None:
            self.value = self.saved

        def sync(self) -> None:
            self.value = int(elastic.group().broadcast_bytes(str(self.value).encode(), 0))
            self.save()

    with Threads("a", "b") as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            @elastic.run(membership=membership)
            def train(state):
                while state.value < 10:
                    state.value += 1
                    if member == "b" and state.value == 6:
                        raise Killed
                    elastic.group().exchange(1)
                    if state.value == 5:
                        state.commit()
                return state.value

            return train(Counter())

        assert workers.run(program, "a", "b") == [10, None]


def test_progress_is_reported_at_each_check():
    agent = Counting()
    membership = elastic.Membership(agent, lambda _: elastic.SoloGroup())
    elastic.run(membership=membership)(lambda state: [state.commit(), state.check_host_updates()])(
        elastic.ObjectState()
    )
    assert agent.progressed == 2


class Counting(elastic.SoloAgent):
    progressed = 0

    def progress(self, busy: float = 0.0, updates: int = 0) -> None:
        self.progressed += 1


def alone() -> elastic.Membership:
    return elastic.Membership(elastic.SoloAgent(), lambda _: elastic.SoloGroup())


def test_variables_of_the_agent_follow_the_rounds(monkeypatch):
    """Those that it has not set stay as they are, and so do all of a program that was started alone."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "STEADFAST_ROUND"):
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv("GROUP_RANK", raising=False)
    elastic.Membership(elastic.SoloAgent()).next_round(None)
    assert os.environ["RANK"] == "7"
    with Threads("a") as workers:
        membership = workers.membership("a")
        membership.next_round(None)
        place = membership.assignment
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "STEADFAST_ROUND")
    assert [os.environ[name] for name in names] == ["0", "1", "0", str(place.master_port), str(place.round)]
    assert place.round > 1 and "GROUP_RANK" not in os.environ
