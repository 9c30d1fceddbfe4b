"""The store of one round: a server in the agent of the first member, at a port that the system chose.

A store is never used in another round. Its address is given to the members through a barrier of the round, after
the server listens, so that no port is fixed or guessed.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from datetime import timedelta
from typing import Any, List, NamedTuple, Optional, Tuple

from torch.distributed import DistError, DistStoreError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from .. import errors
from .node import Member, Node, Round, is_lost, is_over, until_answered

__all__ = ["RoundStore", "StoreAddress", "open_store"]

log = logging.getLogger(__name__)

TAG = "torchrun-store"
STORE_TIMEOUT = timedelta(minutes=5)
CONNECT_SECONDS = 60.0
POLL_SECONDS = 0.1

# The keys with which torchrun's agents agree on the ranks of workers.
ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"

# The keys with which they wait for each other when their workers have succeeded.
TERMINAL_STATE = "torchelastic/agent/terminal_state"


class StoreAddress(NamedTuple):
    """Where the store of a round listens."""

    host: str
    port: int

    def to_bytes(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> StoreAddress:
        return cls(*json.loads(data))


def open_store(node: Node, formed: Round, host: str, deadline: float) -> Tuple[Store, StoreAddress]:
    """Returns a new store that all members of the round share.

    Raises:
        RoundEnded: A member was lost meanwhile.
        RendezvousTimeout: A member did not come this far in time.
        RendezvousConnectionError: The first member cannot be reached.
    """
    server = _listen() if formed.rank == 0 else None
    data = StoreAddress(host, server.port).to_bytes() if server else b""
    answers = until_answered(lambda left: node.barrier(formed.round, TAG, data, left), deadline)
    first = Member(*formed.members[0])
    address = StoreAddress.from_bytes(answers[first.node_id])
    return server or _connect(node, formed, address), address


def _listen() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)


def _connect(node: Node, formed: Round, address: StoreAddress) -> TCPStore:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            # TCPStore waits without looking at signals. This does not.
            socket.create_connection(address, timeout=5).close()
            return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
        except (OSError, DistError) as error:
            if is_lost(node, formed):
                raise errors.RoundEnded(f"round {formed.round} is over: {address.host} is lost") from error
            if deadline < time.monotonic():
                raise RendezvousConnectionError(
                    f"cannot connect to {address.host}:{address.port}, the store of round {formed.round}: "
                    f"{error}; let nodes connect to any port of each other, or set --local-addr on that node"
                ) from error
        time.sleep(POLL_SECONDS)


class RoundStore(PrefixStore):
    """A store that does not wait for members that are lost.

    torchrun ends with an error if its agents cannot agree on the ranks of workers, and only then asks whether a
    node is lost. So if one is lost at that moment, its part is made up: the workers start, torchrun asks, and
    they are stopped for the next round.
    """

    def __init__(self, store: Store, formed: Round, node: Node) -> None:
        super().__init__(f"round-{formed.round}", store)
        self._formed = formed
        self._node = node
        self._role_info: Optional[bytes] = None

    def set(self, key: str, value: Any) -> None:
        if key.startswith(ROLE_INFO):
            self._role_info = value if isinstance(value, bytes) else str(value).encode()
        try:
            super().set(key, value)
        except DistError:
            self._check_lost()

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: List[str]) -> List[bytes]:
        try:
            self.wait(keys)
            return super().multi_get(keys)
        except DistError:
            self._check_lost()
            return [self._made_up(key) for key in keys]

    def wait(self, keys: List[str], timeout: Optional[timedelta] = None) -> None:
        """Waits until all keys are set. Fails early if a member is lost, or, at the end, has failed."""
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        is_exit = any(key.startswith(TERMINAL_STATE) for key in keys)
        if is_exit:
            self._note_success()
        # PyTorch logs each wait that times out, so this only asks.
        while not self._has(keys, is_exit):
            if is_lost(self._node, self._formed):
                raise DistStoreError(f"a member of round {self._formed.round} is lost")
            if is_exit and is_over(self._node, self._formed):
                raise DistStoreError(f"a member of round {self._formed.round} has failed")
            if deadline < time.monotonic():
                raise DistStoreError(f"no node has set {', '.join(keys)} in time")
            time.sleep(POLL_SECONDS)

    def _has(self, keys: List[str], is_exit: bool) -> bool:
        """Whether all keys are set. The node that serves the store may have left once all nodes have succeeded."""
        try:
            return self.check(keys)
        except DistError:
            if is_exit and self._note_success():
                return True
            raise

    def _note_success(self) -> bool:
        """Notes the success of this node before it waits: nodes that arrive then do not disturb the others.

        Returns:
            Whether all nodes have succeeded, as far as the master answers.
        """
        try:
            return self._node.succeed(self._formed.round, 0.0)
        except errors.SteadfastError as error:
            log.debug("the success is noted later: %s", error)
            return False

    def _check_lost(self) -> None:
        """Raises the error that is being handled, unless the reason is a lost member."""
        deadline = time.monotonic() + CONNECT_SECONDS
        # A connection breaks at once, and the lease of its node ends a little later.
        while not is_lost(self._node, self._formed):
            if deadline < time.monotonic():
                raise
            time.sleep(POLL_SECONDS)

    def _made_up(self, key: str) -> bytes:
        if self._role_info is None:
            raise
        if key.startswith(ROLE_INFO):
            return self._role_info
        if not key.startswith(ASSIGNED_RANKS):
            raise
        workers = json.loads(self._role_info)["local_world_size"]
        first = int(key[len(ASSIGNED_RANKS) :]) * workers
        world = len(self._formed.members) * workers
        return json.dumps([first, world, first, world]).encode()
