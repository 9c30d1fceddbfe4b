"""What a state keeps, without other workers."""

from __future__ import annotations

import dataclasses
import enum
import re
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any, List

import numpy as np
import pytest
import steadfast
from steadfast import elastic
from steadfast.elastic._snapshot import decode, encode

Point = namedtuple("Point", "x y")


class Phase(enum.Enum):
    WARM, COLD = 1, 2


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Way(enum.Flag):
    UP, DOWN = 1, 2


class Named(dict):
    """A dict that its constructor does not make from its items, with an attribute."""

    def __init__(self, name: str, items: Any) -> None:
        super().__init__(items)
        self.name = name

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError

    def __repr__(self) -> str:
        return f"{self.name}{super().__repr__()}"


class Steps(int):
    pass


class Names(List[str]):
    pass


@dataclasses.dataclass
class Plain:
    best: float
    seen: List[Any]


class Slots:
    __slots__ = ("__hidden", "absent", "shown")

    def __init__(self) -> None:
        self.shown, self.__hidden = [1], {2}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"{self.shown} {self.__hidden} {hasattr(self, 'absent')}"


VALUES = {
    "set": {1, (2, 3)},
    "frozenset": frozenset([b"a"]),
    "complex": complex("nan-infj"),
    "queue": deque([1, 2], maxlen=2),
    "counter": Counter({3: 2}),
    "default": defaultdict(list, a=[1]),
    "no_default": defaultdict(None, a=[1]),
    "named_tuple": Point(1, [2]),
    "phase": Phase.COLD,
    "level": [Level.HIGH],
    "way": Way.UP | Way.DOWN,
    "of_dict": Named("n", {"$": 1, 2: Point(3, 4)}),
    "of_int": Steps(2**70),
    "of_list": Names(["a"]),
    "object": Plain(best=float("inf"), seen=[Plain(1.0, [])]),
    "slots": Slots(),
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
        ([0, {"a": threading.Lock()}], r"`x\[1\]\['a'\]` is a _thread.lock"),
        (Plain(1.0, [re.compile("a")]), r"`x.seen\[0\]` is a re.Pattern"),
        (dataclasses.make_dataclass("Local", [])(), "not found by its name.*in a module"),
        (defaultdict(lambda: 0), "`x` is a defaultdict of <function"),
        (defaultdict(Plain), "`x` is a defaultdict of .*Plain"),
        (ValueError("a"), "`x` is a ValueError"),
        (Plain, "`x` is a type"),
        ((i for i in range(3)), "generator"),
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


def test_a_class_that_a_worker_has_not_imported_is_named(monkeypatch):
    data = encode({"a": Plain(1.0, [])})
    monkeypatch.delattr(sys.modules[__name__], "Plain")
    with pytest.raises(steadfast.InvalidError, match="a test_elastic_state.Plain, which this worker does not know"):
        decode(data)


def test_a_snapshot_calls_no_constructor_and_no_method(monkeypatch):
    data = encode({"a": Plain(1.0, []), "b": Named("n", {1: 2}), "c": Slots(), "d": Names(["a"])})

    def called(*_: Any) -> None:
        raise AssertionError

    for kind in (Plain, Named, Slots, Names):
        for method in ("__init__", "__setattr__", "__setitem__", "extend", "append", "update"):
            monkeypatch.setattr(kind, method, called, raising=False)
    assert decode(data)["a"].best == 1.0


def test_damaged_bytes_are_refused():
    data = encode({"a": np.arange(100), "b": (1, 2), "c": [Counter("a"), Phase.WARM, Plain(1.0, [])]})
    assert set(decode(data)) == {"a", "b", "c"}
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


class Variable:
    """As one of TensorFlow."""

    def __init__(self, value: Any) -> None:
        self.value = np.array(value)

    def assign(self, value: Any) -> None:
        self.value = np.array(value)

    def numpy(self) -> np.ndarray:
        return self.value

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self.value


def test_variables_keep_their_identity():
    """S001-41"""
    variables = [Variable([1.0, 2.0]), Variable(3)]
    state = elastic.ObjectState(variables=variables, single=variables[0])
    for it in variables:
        it.assign(np.zeros_like(it.value))
    state.restore()
    assert state.variables is variables and state.single is variables[0]
    assert [it.value.tolist() for it in variables] == [[1.0, 2.0], 3]


def test_variables_of_tensorflow_go_back():
    """S001-41"""
    tensorflow = pytest.importorskip("tensorflow")
    weight = tensorflow.Variable([1.0, 2.0])
    state = elastic.ObjectState(weight=weight, steps=0)
    state.steps = 1
    weight.assign_add([1.0, 1.0])
    state.save()
    weight.assign([0.0, 0.0])
    state.restore()
    assert weight.numpy().tolist() == [2.0, 3.0] and state.weight is weight


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
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"WORLD_SIZE": "4"})
    assert "WORLD_SIZE is 4, but no agent started this worker" in shown.stderr


class Finalized:
    deleted: List[str] = []

    def __del__(self) -> None:
        self.deleted.append("a file")


class Guarded:
    @property
    def secret(self) -> int:
        return 1

    @secret.setter
    def secret(self, value: int) -> None:
        Finalized.deleted.append("a property")


class Recent(OrderedDict):
    pass


def test_a_saved_state_runs_no_code_of_the_classes_that_it_names():
    with pytest.raises(steadfast.InvalidError, match="Finalized"):
        encode({"a": Finalized()})
    Finalized.deleted.clear()
    guarded = Guarded()
    guarded.__dict__["secret"] = 2
    assert vars(decode(encode({"a": guarded}))["a"]) == {"secret": 2}
    assert Finalized.deleted == []


def test_an_ordered_dict_keeps_its_order():
    recent = Recent(a=1, b=2)
    recent.move_to_end("a")
    assert list(decode(encode({"a": recent}))["a"]) == ["b", "a"]
