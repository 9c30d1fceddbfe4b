"""Agents for tests: a coordinator forms rounds of threads, or of processes that reach it through a socket."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import socketserver
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from ports import free_port
from steadfast.elastic import Assignment

REMOVED, ADDED = 1, 2

LEASE_SECONDS = 3.0


class Coordinator:
    """Knows the members, oldest first, and forms a round when each of them is ready to leave the last one.

    A member is a process: ``node`` or ``node/instance``. A commit belongs to the node and outlives the
    process.
    """

    def __init__(self, members: Sequence[str]) -> None:
        self._changed = threading.Condition()
        self._members: List[str] = list(members)
        self._ready: Set[str] = set()
        self._round = 0
        self._formed: List[str] = []
        self._formed_at = 0
        self._port = 0
        self._changes: List[int] = []
        self.commits: Dict[str, Tuple[int, bytes]] = {}
        self.notes: List[Any] = []
        with self._changed:
            self._form(members)

    def agent(self, member: str) -> "MemberAgent":
        return MemberAgent(self, member)

    def add(self, member: str, rank: Optional[int] = None) -> None:
        """Adds a member, as the last one by default."""
        with self._changed:
            self._members.insert(len(self._members) if rank is None else rank, member)
            self._ready.add(member)
            self._change(ADDED)

    def remove(self, member: str) -> None:
        with self._changed:
            if member in self._members:
                self._members.remove(member)
                self._change(REMOVED)

    def is_ready(self, member: str) -> bool:
        """Returns whether a member waits for the next round."""
        with self._changed:
            return member in self._ready

    def note(self, note: Any) -> None:
        """Records what a worker reports, for the test."""
        with self._changed:
            self.notes.append(note)
            self._changed.notify_all()

    def until(self, holds: Callable[[List[Any]], bool], timeout: float = 30) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self.notes), timeout), self.notes[-20:]

    def assignment(self, member: str) -> Assignment:
        with self._changed:
            assert self._changed.wait_for(lambda: member in self._formed, 30), "no round was formed"
            return self._place(member)

    def changes(self, member: str, since: int) -> Tuple[int, int]:
        with self._changed:
            bits = 0
            for change in self._changes[max(since, self._formed_at) :]:
                bits |= change
            return len(self._changes), bits

    def is_over(self, round: int) -> bool:
        """Waits as long as an agent does for the end of a lease."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._round != round or self._formed_at < len(self._changes), LEASE_SECONDS
            )

    def next_round(self, member: str, after: int, timeout: Optional[float]) -> Assignment:
        with self._changed:
            if self._round <= after:
                self._ready.add(member)
                self._changed.notify_all()
                self._maybe_form()
            if not self._changed.wait_for(lambda: self._may_leave(member, after), timeout):
                waited_for = [it for it in self._members if it not in self._ready]
                raise TimeoutError(f"no round after {after}: waiting for {', '.join(waited_for)}")
            if member not in self._members:
                raise TimeoutError(f"{member} was removed")
            return self._place(member)

    def put_commit(self, member: str, number: int, data: bytes) -> None:
        with self._changed:
            self.commits[member.partition("/")[0]] = (number, data)

    def get_commit(self, member: str) -> Optional[Tuple[int, bytes]]:
        with self._changed:
            return self.commits.get(member.partition("/")[0])

    def _may_leave(self, member: str, after: int) -> bool:
        return member not in self._members or (self._round > after and member in self._formed)

    def _change(self, bits: int) -> None:
        self._changes.append(bits)
        self._maybe_form()

    def _maybe_form(self) -> None:
        # A round that is running goes on until its workers leave it, or die.
        if self._members and self._ready.issuperset(self._members):
            self._form(self._members)

    def _form(self, members: Sequence[str]) -> None:
        self._round += 1
        self._formed = list(members)
        self._formed_at = len(self._changes)
        self._ready.clear()
        self._port = free_port()
        self._changed.notify_all()

    def _place(self, member: str) -> Assignment:
        rank, size = self._formed.index(member), len(self._formed)
        return Assignment(self._round, rank, 0, size, 1, rank, size, "127.0.0.1", self._port)


class MemberAgent:
    """The agent of one member, in this process."""

    def __init__(self, coordinator: Coordinator, member: str) -> None:
        self._coordinator = coordinator
        self._member = member
        self.progressed = 0

    def assignment(self) -> Assignment:
        return self._coordinator.assignment(self._member)

    def changes(self, since: int) -> Tuple[int, int]:
        return self._coordinator.changes(self._member, since)

    def next_round(self, after: int, timeout: Optional[float]) -> Assignment:
        return self._coordinator.next_round(self._member, after, timeout)

    def is_over(self, round: int) -> bool:
        return self._coordinator.is_over(round)

    def put_commit(self, number: int, parts: Sequence[Any]) -> None:
        self._coordinator.put_commit(self._member, number, b"".join(parts))

    def get_commit(self) -> Optional[Tuple[int, bytes]]:
        return self._coordinator.get_commit(self._member)

    def progress(self, busy: float = 0.0, updates: int = 0) -> None:
        self.progressed += 1


@contextlib.contextmanager
def served(coordinator: Coordinator) -> Iterator[int]:
    """Serves a coordinator to other processes; yields the port. One line of JSON for a call and for its
    reply.
    """

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                method, arguments = json.loads(line)
                try:
                    reply = {"value": _call(coordinator, method, arguments)}
                except TimeoutError as error:
                    reply = {"timeout": str(error)}
                with contextlib.suppress(OSError):
                    self.wfile.write(json.dumps(reply).encode() + b"\n")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def _call(coordinator: Coordinator, method: str, arguments: List[Any]) -> Any:
    if method == "put_commit":
        member, number, data = arguments
        return coordinator.put_commit(member, number, base64.b64decode(data))
    if method == "get_commit":
        kept = coordinator.get_commit(*arguments)
        return kept and [kept[0], base64.b64encode(kept[1]).decode()]
    return getattr(coordinator, method)(*arguments)


class RemoteAgent:
    """The agent of one member, from another process."""

    def __init__(self, port: int, member: str) -> None:
        self._file = socket.create_connection(("127.0.0.1", port)).makefile("rwb")
        self._member = member

    def note(self, *note: Any) -> None:
        """Reports something to the test."""
        self._ask("note", list(note))

    def assignment(self) -> Assignment:
        return Assignment(*self._ask("assignment", self._member))

    def changes(self, since: int) -> Tuple[int, int]:
        revision, bits = self._ask("changes", self._member, since)
        return revision, bits

    def next_round(self, after: int, timeout: Optional[float]) -> Assignment:
        return Assignment(*self._ask("next_round", self._member, after, timeout))

    def is_over(self, round: int) -> bool:
        return bool(self._ask("is_over", round))

    def put_commit(self, number: int, parts: Sequence[Any]) -> None:
        self._ask("put_commit", self._member, number, base64.b64encode(b"".join(parts)).decode())

    def get_commit(self) -> Optional[Tuple[int, bytes]]:
        kept = self._ask("get_commit", self._member)
        return kept and (kept[0], base64.b64decode(kept[1]))

    def progress(self, busy: float = 0.0, updates: int = 0) -> None:
        pass

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._file.write(json.dumps([method, arguments]).encode() + b"\n")
        self._file.flush()
        reply = json.loads(self._file.readline())
        if "timeout" in reply:
            raise TimeoutError(reply["timeout"])
        return reply["value"]
