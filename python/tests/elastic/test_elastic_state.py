"""What a state keeps, without other workers."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest

import steadfast
from steadfast import elastic
from steadfast.elastic._snapshot import decode, encode

VALUES = {
    "nothing": None,
    "truth": True,
    "whole": -(2**70),
    "real": 0.1,
    "infinite": float("-inf"),
    "zero": -0.0,
    "text": "ä\ud800",
    "raw": b"\0\xff",
    "empty": b"",
    "mutable": bytearray(b"ab"),
    "nested": [1, (2, [3, {}]), {"$": 1, "a": [()]}],
    "keys": {1: "a", "1": "b", (1, "x"): None, True and 2.5: 1},
    "ordered": OrderedDict(b=1, a=2),
    "scalar": np.float32(0.1),
    "array": np.arange(6, dtype=">i2").reshape(2, 3).T,
    "zero_d": np.array(3.5),
    "no_rows": np.zeros((0, 4), np.uint8),
    "words": np.array(["a", "bcd"]),
    "time": np.array(["2024-01-01"], "M8[D]"),
}


def same(one: object, other: object) -> bool:
    if isinstance(one, (np.ndarray, np.generic)):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(name):
    assert same(decode(encode({name: VALUES[name]}))[name], VALUES[name])


@pytest.mark.parametrize(
    "value, where",
    [
        (object(), "`x` is a object"),
        ([0, {"a": {1, 2}}], r"`x\[1\]\['a'\]` is a set"),
        ((lambda: 0), "function"),
        (np.array([object()]), "`x` is an array of object"),
    ],
)
def test_what_cannot_be_saved_is_named(value, where):
    with pytest.raises(steadfast.InvalidError, match=where):
        elastic.ObjectState(x=value)


def test_a_value_that_contains_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(steadfast.InvalidError, match="nested too deeply"):
        elastic.ObjectState(x=value)


def test_damaged_bytes_are_refused():
    data = encode({"a": np.arange(100), "b": (1, 2)})
    assert set(decode(data)) == {"a", "b"}
    for end in (0, 3, 12, 20, len(data) - 1):
        with pytest.raises(steadfast.InvalidError, match="damaged"):
            decode(data[:end])
    generator = np.random.default_rng(5)
    for _ in range(500):
        other = bytearray(data)
        other[generator.integers(len(data))] = generator.integers(256)
        try:
            decode(other)
        except steadfast.InvalidError:
            pass


def test_a_state_goes_back_to_its_last_save():
    """S001-35"""
    state = elastic.ObjectState(weights=np.zeros(2), history=[[1], {"a": [2]}], epoch=0)
    state.epoch = 1
    state.weights += 1
    state.history[0].append(5)
    state.save()
    state.epoch = 2
    state.weights += 1
    state.history[1]["a"].append(3)
    for _ in range(2):
        state.restore()
        assert state.epoch == 1
        assert state.weights.tolist() == [1, 1]
        assert state.history == [[1, 5], {"a": [2]}]
        # What was restored is no part of what is saved.
        state.weights += 7
        state.history[1]["a"].append(9)


def test_a_state_without_a_commit_goes_back_to_its_initial_values():
    state = elastic.ObjectState(weights=np.zeros(2), history=[])
    state.weights += 1
    state.history.append(1)
    state.restore()
    assert state.weights.tolist() == [0, 0]
    assert state.history == []


def test_a_save_that_fails_leaves_the_last_one():
    state = elastic.ObjectState(a=1, b=1)
    state.a, state.b = 2, object()
    with pytest.raises(steadfast.InvalidError, match="`b`"):
        state.save()
    state.restore()
    assert (state.a, state.b) == (1, 1)


def test_an_attribute_does_not_replace_a_method():
    for name in ("commit", "sync", "_number"):
        with pytest.raises(steadfast.InvalidError, match=name):
            elastic.ObjectState(**{name: 1})


def test_importing_elastic_imports_no_framework():
    program = (
        "import sys, steadfast.elastic as e; s = e.ObjectState(a=1); e.run(lambda s: s.commit())(s); "
        "print([it for it in ('torch', 'tensorflow', 'keras') if it in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_program_alone_is_the_only_worker():
    """S001-22: without an agent nothing notifies, and nothing fails."""
    agent = elastic.SoloAgent()
    assert agent.changes(0) == (0, 0)
    state = elastic.ObjectState(epoch=0)

    @elastic.run(membership=elastic.Membership(agent, lambda _: elastic.SoloGroup()))
    def train(state, epochs):
        assert elastic.assignment().world_size == 1
        while state.epoch < epochs:
            state.epoch += 1
            state.commit()
        return "trained"

    assert train(state, 3) == "trained"
    assert state.epoch == 3


def test_several_workers_without_an_agent_do_not_train_alone():
    program = "import steadfast.elastic as e; e.run(print)(e.ObjectState())"
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"WORLD_SIZE": "4"}
    )
    assert "WORLD_SIZE is 4, but no agent started this worker" in shown.stderr
