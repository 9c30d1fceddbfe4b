"""The rendezvous of ``--rdzv-backend=steadfast-c10d``: PyTorch's own, with its state in the master.

The state and the keys that torchrun's agents exchange are one value, which is only replaced with the token of the
value that was read. So no change is lost, and no agent hosts what others need after it.
"""

from __future__ import annotations

import atexit
import base64
import json
import logging
import re
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

from torch.distributed import DistStoreError, Store
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from .. import errors
from .node import Node, open_node, torch_errors
from .settings import C10D_KEYS, parse
from .signals import as_exceptions

__all__ = ["C10dHandler", "MasterBackend", "MasterStore", "create"]

log = logging.getLogger(__name__)

T = TypeVar("T")

NAME = "steadfast-c10d"
POLL_SECONDS = 0.1


def create(params: Any) -> C10dHandler:
    """Creates the handler for torchrun's parameters."""
    settings = parse(params, C10D_KEYS)

    def seconds(key: str) -> Optional[timedelta]:
        return timedelta(seconds=float(params.get(key))) if params.get(key) is not None else None

    timeout = RendezvousTimeout(
        timedelta(seconds=settings.join_timeout),
        seconds("last_call_timeout"),
        seconds("close_timeout"),
        seconds("heartbeat_timeout"),
    )
    more = {key: params.get_as_int(key) for key in ("keep_alive_interval", "keep_alive_max_attempt") if params.get(key)}
    if params.get("cas_backoff_max_seconds"):
        more["cas_backoff_max_seconds"] = float(params.get("cas_backoff_max_seconds"))
    node = open_node(settings)
    store = MasterStore(node)
    handler = C10dHandler.from_backend(
        settings.job,
        store,
        MasterBackend(node),
        settings.nodes_min,
        settings.nodes_max,
        settings.host,
        timeout,
        **more,
    )
    handler.use_node(node, store)
    return handler


class C10dHandler(DynamicRendezvousHandler):
    """PyTorch's handler. Unlike there, a lost node is a change, and a node that fails does not end the job."""

    _node: Node
    _keys: MasterStore
    _nodes = 0

    def use_node(self, node: Node, keys: MasterStore) -> None:
        """Sets the node through which the state and the keys of all rounds are kept."""
        self._node, self._keys = node, keys
        atexit.register(node.close)

    def next_rendezvous(self) -> RendezvousInfo:
        # PyTorch keeps the address of the first round's store, even if its host is lost.
        self._bootstrap_store_info = None
        self._shared_tcp_store_server = None
        try:
            with as_exceptions():
                info = super().next_rendezvous()
        except (SignalException, KeyboardInterrupt):
            self._node.close()
            raise
        self._nodes = info.world_size
        return info

    def num_nodes_waiting(self) -> int:
        try:
            waiting = super().num_nodes_waiting()
        except RendezvousConnectionError as error:
            # Workers do not need the master.
            log.debug("changes of the job's nodes are not seen: %s", error)
            return 0
        # Nodes without a heartbeat are not participants any more.
        return waiting or max(0, self._nodes - len(self._state_holder.state.participants))

    def shutdown(self) -> bool:
        failure = sys.exc_info()[1]
        try:
            if failure is not None:
                self._stop_heartbeats()
                return True
            closed = super().shutdown()
            self._end_job()
            return closed
        finally:
            self._node.close()

    def _end_job(self) -> None:
        """Ends the job in the master, as the last node of its last round. Others still use its state."""
        finished = f"steadfast.finished/{self._state_holder.state.round}"
        try:
            if self._keys.add(finished, 1) == self._nodes:
                self._node.set_closed()
        except (errors.SteadfastError, RendezvousError) as error:
            log.warning("the master does not know that the job has ended: %s", error)


@dataclass
class _Shared:
    """What the master keeps for a job."""

    state: bytes = b""
    keys: Dict[str, bytes] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        keys = {key: base64.b64encode(value).decode() for key, value in self.keys.items()}
        return json.dumps({"state": base64.b64encode(self.state).decode(), "keys": keys}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> _Shared:
        given = json.loads(data)
        keys = {key: base64.b64decode(value) for key, value in given["keys"].items()}
        return cls(base64.b64decode(given["state"]), keys)


class MasterBackend(RendezvousBackend):
    """Keeps PyTorch's state in the master. The token is the master's."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> Optional[Tuple[bytes, int]]:
        with torch_errors():
            found = self._node.get_state()
        return (_Shared.from_bytes(found[0]).state, found[1]) if found else None

    def set_state(self, state: bytes, token: Optional[int] = None) -> Optional[Tuple[bytes, int, bool]]:
        with torch_errors():
            found = self._node.get_state()
            if (found[1] if found else None) != token:
                return (_Shared.from_bytes(found[0]).state, found[1], False) if found else None
            shared = _Shared.from_bytes(found[0]) if found else _Shared()
            shared.state = state
            data, token, accepted = self._node.set_state(shared.to_bytes(), token)
        return _Shared.from_bytes(data).state, token, accepted


class MasterStore(Store):
    """Keeps the keys of torchrun's agents beside PyTorch's state. Only those of the last two rounds are kept."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node

    def set(self, key: str, value: Any) -> None:
        self._change(lambda keys: keys.__setitem__(key, _bytes(value)))

    def multi_set(self, keys: List[str], values: List[Any]) -> None:
        self._change(lambda found: found.update(zip(keys, map(_bytes, values))))

    def add(self, key: str, amount: int) -> int:
        def added(keys: Dict[str, bytes]) -> int:
            total = int(keys.get(key, b"0")) + amount
            keys[key] = str(total).encode()
            return total

        return self._change(added)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: List[str]) -> List[bytes]:
        found = self._wait(keys, None)
        return [found[key] for key in keys]

    def check(self, keys: List[str]) -> bool:
        found = self._keys()
        return all(key in found for key in keys)

    def wait(self, keys: List[str], timeout: Optional[timedelta] = None) -> None:
        self._wait(keys, timeout)

    def _wait(self, keys: List[str], timeout: Optional[timedelta]) -> Dict[str, bytes]:
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        while True:
            found = self._keys()
            missing = [key for key in keys if key not in found]
            if not missing:
                return found
            if deadline < time.monotonic():
                raise DistStoreError(f"no node has set {', '.join(missing)} in time")
            time.sleep(POLL_SECONDS)

    def _keys(self) -> Dict[str, bytes]:
        with torch_errors():
            found = self._node.get_state()
        return _Shared.from_bytes(found[0]).keys if found else {}

    def _change(self, change: Callable[[Dict[str, bytes]], T]) -> T:
        with torch_errors():
            found = self._node.get_state()
            while True:
                shared, token = (_Shared.from_bytes(found[0]), found[1]) if found else (_Shared(), None)
                result = change(shared.keys)
                _drop_old_rounds(shared.keys)
                data, token, accepted = self._node.set_state(shared.to_bytes(), token)
                if accepted:
                    return result
                found = (data, token)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _drop_old_rounds(keys: Dict[str, bytes]) -> None:
    # PyTorch's prefix for the keys of a round.
    found = {key: re.match(r"torch\.rendezvous\..*?\.(\d+)/", key) for key in keys}
    rounds = {key: int(it.group(1)) for key, it in found.items() if it}
    for key, number in rounds.items():
        if number < max(rounds.values()) - 1:
            del keys[key]
