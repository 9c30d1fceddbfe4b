"""Elastic training in TensorFlow, with ``tf.distribute.MultiWorkerMirroredStrategy``."""

from __future__ import annotations

import importlib
import json
import os
import random
import socket
import sys
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Sequence

from ..errors import InvalidError
from ._membership import assignment, membership
from ._snapshot import decode
from ._variables import Variables
from .state import ObjectState

__all__ = ["ElasticDataset", "TensorFlowState"]

_PORTS = range(20_000, 32_000)
"""Ports that the kernel gives to no outgoing connection, as a rule."""

_TRIES = 1000


class TensorFlowState(ObjectState):
    """Keeps variables of TensorFlow that are made anew in each round, and attributes.

    ::

        state = steadfast.elastic.TensorFlowState(step=0)

        @steadfast.elastic.run
        def train(state):
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            with strategy.scope():
                weights = tf.Variable(tf.zeros((20, 2)))
            state.attach([weights])
            while state.step < 1000:
                ...
                state.step += 1
                state.commit()

    A strategy belongs to the workers with which it was made. In a new round the runtime of TensorFlow is therefore
    reset in the process, and ``TF_CONFIG`` names the new workers. All that is TensorFlow's, also settings of
    ``tf.config`` and datasets, is made within the training function: what was made before is not valid any more.

    Args:
        attributes: Other attributes, as of :class:`ObjectState`.

    Raises:
        InvalidError: An attribute cannot be saved, or has the name of a method.
    """

    variables: "Attached"

    def __init__(self, **attributes: Any) -> None:
        # Whether `TF_CONFIG` is one that the agent has set, of the first round of this process.
        self._is_first = True
        super().__init__(variables=Attached(), **attributes)

    def attach(self, variables: Sequence[Any]) -> None:
        """Gives the variables of this round the values of the state. The first time, they keep their initial values.

        Call it in each round, before the first step, with the same variables in the same order.

        Raises:
            InvalidError: Variables of the state have other shapes.
        """
        self.variables.attach(variables)

    def reset(self) -> None:
        """Drops the variables of the last round, and resets the runtime of TensorFlow."""
        self.variables.detach(decode(self._saved)["variables"])
        _reset_runtime()
        super().reset()

    def on_round(self) -> None:
        """Sets ``TF_CONFIG`` to the workers of the round, and checks that they divide the data likewise."""
        super().on_round()
        given = os.environ.get("TF_CONFIG")
        if given is None:
            return
        config = json.loads(given)
        address = config["cluster"]["worker"][config["task"]["index"]]
        if not self._is_first:
            # The server of the last round still listens at its port.
            host = address.rpartition(":")[0]
            address = f"{host}:{_free_port()}"
        self._is_first = False
        current = membership()
        place, group = current.assignment, current.group
        found = [
            bytes(group.broadcast_bytes(address.encode() if place.rank == root else None, root)).decode()
            for root in range(place.world_size)
        ]
        task = {"type": "worker", "index": place.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": found}, "task": task})


class Attached:
    """The values of variables, which the variables of a round have while they are attached."""

    def __init__(self) -> None:
        self._held: Mapping[str, Any] = {"values": None}
        self._variables: Optional[Variables] = None

    def attach(self, variables: Sequence[Any]) -> None:
        """Gives variables the values, if there are any."""
        attached = Variables("variables", variables)
        if self._held["values"] is not None:
            attached.load_state_dict(self._held)
        self._variables, self._held = attached, {"values": None}

    def detach(self, held: Mapping[str, Any]) -> None:
        """Drops the variables, and keeps values for others."""
        self._variables, self._held = None, held

    def state_dict(self) -> Mapping[str, Any]:
        return self._held if self._variables is None else self._variables.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._variables is None:
            self._held = state
            return
        try:
            self._variables.load_state_dict(state)
        except _tensorflow().errors.OpError:
            # After a failed operation nothing can be computed in this round any more. The next one has the values.
            self.detach(state)


class ElasticDataset:
    """Yields this worker's part of the batches of a ``tf.data.Dataset``, whose position is part of a state.

    ::

        def records(epoch):
            return tf.data.TFRecordDataset(files).shuffle(10_000, seed=epoch, reshuffle_each_iteration=False)

        data = steadfast.elastic.tensorflow.ElasticDataset(records, batch_size=256)
        state = steadfast.elastic.TensorFlowState(data=data)
        ...
            while data.epoch < 10:
                for batch in data:
                    ...
                    state.commit()

    A batch has the same records for any number of workers, which divide it among themselves. All workers take the same
    number of steps; in the last step of an epoch a part can be smaller, or empty. A batch counts as used when it was
    yielded, so commit after its step. A round that begins in the middle of an epoch reads it from its start, and skips
    the batches that were used.

    Args:
        records: Called with the epoch; returns its records, not batched, in an order that depends on the epoch alone.
        batch_size: Records of a batch, of all workers together.
    """

    def __init__(self, records: Callable[[int], Any], batch_size: int) -> None:
        if batch_size < 1:
            raise InvalidError(f"`batch_size` is {batch_size}; it is at least 1")
        self._records = records
        self._batch_size = batch_size
        self._epoch = 0
        self._batches = 0

    @property
    def epoch(self) -> int:
        """The epoch, from 0. It ends with its last batch."""
        return self._epoch

    @property
    def batches(self) -> int:
        """Number of batches of this epoch that were used."""
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        """Yields this worker's part of the batches that are left in the epoch."""
        nest = _tensorflow().nest
        place = assignment()

        def part(*batch: Any) -> Any:
            # A dataset passes the components of a tuple one by one.
            whole = batch if len(batch) > 1 else batch[0]
            return nest.map_structure(lambda it: it[place.rank :: place.world_size], whole)

        batches = self._records(self._epoch).batch(self._batch_size).skip(self._batches).map(part)
        for batch in batches.prefetch(1):
            self._batches += 1
            yield batch
        self._epoch += 1
        self._batches = 0

    def state_dict(self) -> Dict[str, Any]:
        """Returns the position within the data."""
        return {"epoch": self._epoch, "batches": self._batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a position, at the next iteration."""
        self._epoch, self._batches = state["epoch"], state["batches"]


def _reset_runtime() -> None:
    """Ends the runtime of TensorFlow in this process; the next use of TensorFlow starts another one.

    TensorFlow has no public function for this: its own tests use this one.
    """
    for name in ("keras", "tf_keras"):
        keras = sys.modules.get(name)
        if keras is not None:
            # Graphs and random generators that belong to the old runtime.
            keras.backend.clear_session()
    _tensorflow()
    context: Any = importlib.import_module("tensorflow.python.eager.context")
    reset = getattr(context, "_reset_context", None)
    if reset is None:
        raise InvalidError(
            "this version of TensorFlow cannot be reset in a process; use `ObjectState`, and restart the program in "
            "each round"
        )
    reset()


def _tensorflow() -> Any:
    # Type checkers would read all of it.
    return importlib.import_module("tensorflow")


def _free_port() -> int:
    for _ in range(_TRIES):
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                pass
    raise InvalidError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")
