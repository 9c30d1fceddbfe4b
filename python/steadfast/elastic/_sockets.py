"""A group of workers that are connected by TCP: for programs without PyTorch.

Rank 0 serves at the port of the round, and the others connect to it. A message is a tag, which says what the operation
is, a length, and the data; rank 0 answers after it has heard of all. An operation on large data costs rank 0 one copy
for each worker, which is enough for what a state needs.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

from ._agent import Assignment, Buffer
from .errors import CollectiveError, WorkerLost

__all__ = ["SocketGroup"]

_HELLO = struct.Struct("<8sQII")
"""Magic, round, rank, number of workers."""

_MAGIC = b"steadfg1"

_HEAD = struct.Struct("<cQ")
"""Tag and length."""

_FORM, _MAX, _BROADCAST = b"f", b"m", b"b"

_CONNECT_SECONDS = 1.0

_PAUSE_SECONDS = 0.02

_PIECE = 1 << 20
"""Bytes that are read at once."""

_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A machine that is lost without a word is noticed within 20 s."""


class SocketGroup:
    """The group of one round.

    Args:
        assignment: The place of this worker.
        timeout: Seconds after which an operation fails if a worker does not take part in it.
        form_timeout: Seconds after which forming the group fails if a worker does not take part.
        is_over: Whether the round is over. Then workers that are missing are not waited for.

    Raises:
        CollectiveError: The group was not formed; another worker may be gone.
    """

    def __init__(
        self,
        assignment: Assignment,
        *,
        timeout: float = 600.0,
        form_timeout: float = 60.0,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank = assignment.rank
        # Of rank 0 to all others, by rank; of the others to rank 0.
        self._peers: List[socket.socket] = []
        deadline = time.monotonic() + form_timeout
        try:
            if self._rank == 0:
                self._peers = _accept_all(assignment, deadline, is_over)
            else:
                self._peers = [_connect(assignment, deadline, is_over)]
            self._form(deadline)
            for peer in self._peers:
                peer.settimeout(timeout)
        except BaseException:
            self.close()
            raise

    def broadcast_bytes(self, data: Optional[Buffer], root: int) -> Buffer:
        """Returns the data of the rank ``root``; that of the others is ignored."""
        with _failures():
            if self._rank == root:
                assert data is not None, "the root has the data"
            elif self._rank == 0:
                data = _receive(self._peers[root - 1], _BROADCAST)
            if self._rank == 0:
                for rank, peer in enumerate(self._peers, 1):
                    if rank != root:
                        _send(peer, _BROADCAST, data or b"")
            elif self._rank == root:
                _send(self._peers[0], _BROADCAST, data or b"")
            else:
                data = _receive(self._peers[0], _BROADCAST)
        assert data is not None
        return data

    def max(self, values: Sequence[int]) -> List[int]:
        """Returns the maximum of each value over all ranks."""
        own = list(values)
        numbers = struct.Struct(f"<{len(own)}q")
        with _failures():
            if self._rank != 0:
                _send(self._peers[0], _MAX, numbers.pack(*own))
                return list(numbers.unpack(_receive(self._peers[0], _MAX, numbers.size)))
            others = [numbers.unpack(_receive(peer, _MAX, numbers.size)) for peer in self._peers]
            found = [max(column) for column in zip(own, *others)]
            for peer in self._peers:
                _send(peer, _MAX, numbers.pack(*found))
            return found

    def close(self) -> None:
        """Leaves the group without waiting for others. Operations that wait for this worker fail."""
        for peer in self._peers:
            peer.close()
        self._peers = []

    def _form(self, deadline: float) -> None:
        """Waits until rank 0 has heard of all: either all of them go on, or none."""
        with _failures():
            if self._rank == 0:
                for peer in self._peers:
                    _send(peer, _FORM, b"")
                return
            # Rank 0 closes the connection when its time is over.
            self._peers[0].settimeout(max(deadline - time.monotonic(), 0.0) + _CONNECT_SECONDS)
            _receive(self._peers[0], _FORM, 0)


def _accept_all(place: Assignment, deadline: float, is_over: Callable[[], bool]) -> List[socket.socket]:
    """Returns the connections of all other workers, by rank."""
    found: "dict[int, socket.socket]" = {}
    try:
        with _served(place) as server:
            while len(found) < place.world_size - 1:
                state = f"{place.world_size - 1 - len(found)} of {place.world_size} workers have not come to the group"
                _check_time(state, deadline, is_over)
                with contextlib.suppress(socket.timeout):
                    peer, _ = server.accept()
                    rank = _hello_of(peer, place)
                    if rank is None or rank in found:
                        peer.close()
                    else:
                        found[rank] = peer
    except BaseException:
        for peer in found.values():
            peer.close()
        raise
    return [found[rank] for rank in sorted(found)]


def _served(place: Assignment) -> socket.socket:
    """Listens at the address of the round; at all addresses if that is not one of this machine, as behind a NAT."""
    family, _, _, _, address = socket.getaddrinfo(place.master_addr, place.master_port, type=socket.SOCK_STREAM)[0]
    try:
        try:
            server = socket.create_server(address[:2], family=family, backlog=place.world_size)
        except OSError:
            server = socket.create_server(("", place.master_port), family=family, backlog=place.world_size)
    except OSError as error:
        # Another program has taken the port: the next round has another one.
        raise CollectiveError(f"cannot listen at {place.master_addr}:{place.master_port}: {error}") from error
    server.settimeout(_PAUSE_SECONDS)
    return server


def _hello_of(peer: socket.socket, place: Assignment) -> Optional[int]:
    """Returns the rank of who has connected; ``None`` if it is not a worker of this round."""
    try:
        _prepare(peer, _CONNECT_SECONDS)
        magic, number, rank, world_size = _HELLO.unpack(_receive_bytes(peer, _HELLO.size))
    except (OSError, EOFError):
        return None
    is_ours = (magic, number, world_size) == (_MAGIC, place.round, place.world_size)
    return rank if is_ours and 0 < rank < world_size else None


def _connect(place: Assignment, deadline: float, is_over: Callable[[], bool]) -> socket.socket:
    while True:
        _check_time("rank 0 does not serve the group", deadline, is_over)
        try:
            peer = socket.create_connection((place.master_addr, place.master_port), _CONNECT_SECONDS)
        except OSError:
            time.sleep(_PAUSE_SECONDS)
            continue
        try:
            _prepare(peer, _CONNECT_SECONDS)
            peer.sendall(_HELLO.pack(_MAGIC, place.round, place.rank, place.world_size))
            return peer
        except OSError:
            peer.close()


def _prepare(peer: socket.socket, timeout: float) -> None:
    peer.settimeout(timeout)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        # Not every system has them.
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _check_time(state: str, deadline: float, is_over: Callable[[], bool]) -> None:
    if is_over():
        raise CollectiveError(f"the round is over: {state}")
    if deadline <= time.monotonic():
        raise CollectiveError(f"the group was not formed in time: {state}")


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raises the errors of connections as those of operations."""
    try:
        yield
    except socket.timeout as error:
        raise CollectiveError("a worker does not take part in an operation") from error
    except (OSError, EOFError, IndexError) as error:
        # Without connections, this worker has left.
        raise WorkerLost(f"a worker has left the group: {error}") from error


def _send(peer: socket.socket, tag: bytes, data: Buffer) -> None:
    view = memoryview(data).cast("B")
    peer.sendall(_HEAD.pack(tag, len(view)))
    peer.sendall(view)


def _receive(peer: socket.socket, tag: bytes, size: Optional[int] = None) -> bytearray:
    found, length = _head(peer)
    if found != tag or size not in (None, length):
        raise CollectiveError("the workers of a group have called different operations")
    return _receive_bytes(peer, length)


def _head(peer: socket.socket) -> Tuple[bytes, int]:
    tag, length = _HEAD.unpack(_receive_bytes(peer, _HEAD.size))
    return tag, length


def _receive_bytes(peer: socket.socket, size: int) -> bytearray:
    # It grows with what has come: the length may be a lie.
    data = bytearray()
    while len(data) < size:
        piece = peer.recv(min(size - len(data), _PIECE))
        if not piece:
            raise EOFError("the connection was closed")
        data += piece
    return data
