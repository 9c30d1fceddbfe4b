"""A rendezvous service for tests, with the rules of the master's: a small TCP server that speaks JSON lines.

A node lives as long as its first connection. Each call has a connection of its own.
"""

from __future__ import annotations

import base64
import json
import socketserver
import threading
import time
from typing import Any, Callable, Dict, List, Optional


class Failure(Exception):
    """An error that the client raises, by the name of its type."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Job:
    """The nodes and the last round of a job."""

    def __init__(self, nodes_min: int, nodes_max: int, last_call: float) -> None:
        self.nodes_min, self.nodes_max, self.last_call = nodes_min, nodes_max, last_call
        self.addresses: Dict[str, str] = {}
        self.round = 0
        self.members: List[str] = []
        self.waiting: List[str] = []
        self.last_arrival = 0.0
        self.entries: Dict[str, Dict[str, str]] = {}
        self.closed = False
        self.state: Optional[str] = None
        self.token = 0

    @property
    def lost(self) -> List[str]:
        return [it for it in self.members if it not in self.addresses]

    @property
    def in_place(self) -> List[str]:
        return [it for it in self.members if it in self.addresses and it not in self.waiting]

    def form(self) -> None:
        if self.in_place or len(self.waiting) < self.nodes_min:
            return
        is_first = not any(it in self.members for it in self.waiting)
        is_late = time.monotonic() < self.last_arrival + self.last_call
        if is_first and len(self.waiting) < self.nodes_max and is_late:
            return
        known = [it for it in self.members if it in self.waiting]
        chosen = (known + [it for it in self.waiting if it not in known])[: self.nodes_max]
        self.round, self.members, self.entries = self.round + 1, chosen, {}
        self.waiting = [it for it in self.waiting if it not in chosen]


class Service:
    """The server. It runs in threads of the test."""

    def __init__(self) -> None:
        self.jobs: Dict[str, Job] = {}
        self.changed = threading.Condition()
        self.available = True
        service = self

        class Connection(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                request = json.loads(self.rfile.readline())
                try:
                    answer = {"ok": service.answer(request)}
                except Failure as failure:
                    answer = {"error": failure.kind, "message": str(failure)}
                self.wfile.write(json.dumps(answer).encode() + b"\n")
                if request["call"] == "register" and "ok" in answer:
                    self.rfile.readline()
                    service.remove(request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 64

        self.server = Server(("127.0.0.1", 0), Connection)
        self.endpoint = "127.0.0.1:%d" % self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: Dict[str, Any]) -> Any:
        if not self.available:
            raise Failure("UnavailableError", "no master answers")
        call: Callable[..., Any] = getattr(self, request["call"])
        with self.changed:
            job = self.jobs.get(request["job"])
            if (
                job is not None
                and request["call"] != "register"
                and request["node"] not in job.addresses
            ):
                raise Failure("NotFoundError", "the node is not registered")
            return call(job, request)

    def register(self, job: Optional[Job], request: Dict[str, Any]) -> None:
        given = (request["nodes_min"], request["nodes_max"])
        if job is None:
            job = Job(*given, float(request["settings"]["last_call"].rstrip("ms")) / 1000)
            self.jobs[request["job"]] = job
        job.addresses[request["node"]] = request["address"]

    def remove(self, request: Dict[str, Any]) -> None:
        with self.changed:
            job = self.jobs[request["job"]]
            job.addresses.pop(request["node"], None)
            if request["node"] in job.waiting:
                job.waiting.remove(request["node"])
            job.form()
            self.changed.notify_all()

    def join(self, job: Job, request: Dict[str, Any]) -> Any:
        node, after = request["node"], request["after"]
        expected = (job.nodes_min, job.nodes_max)
        given = (request["nodes_min"], request["nodes_max"])
        if given != expected:
            raise Failure(
                "NodeRangeMismatch",
                "the node expects %d to %d nodes, and the job %d to %d" % (*given, *expected),
            )
        deadline = time.monotonic() + request["timeout"]
        if node not in job.members or job.round <= after:
            job.waiting.append(node)
            job.last_arrival = time.monotonic()
        while True:
            if job.closed:
                raise Failure("RendezvousClosed", "the job has ended")
            if node not in job.addresses:
                raise Failure("NotFoundError", "the node is gone")
            job.form()
            self.changed.notify_all()
            if node in job.members and after < job.round:
                return [
                    job.round,
                    job.members.index(node),
                    [
                        [it, job.addresses.get(it, "?:0"), 1, rank]
                        for rank, it in enumerate(job.members)
                    ],
                ]
            if deadline <= time.monotonic():
                job.waiting.remove(node)
                awaited = ", ".join(job.addresses[it] for it in job.in_place) or "any node"
                raise Failure(
                    "RendezvousTimeout",
                    "%d of %d nodes joined; waited for %s"
                    % (len(job.waiting) + 1, job.nodes_min, awaited),
                )
            last_call = job.last_arrival + job.last_call
            until = last_call if time.monotonic() < last_call else deadline
            self.changed.wait(max(0.01, min(until, deadline) - time.monotonic()))

    def waiting(self, job: Job, request: Dict[str, Any]) -> int:
        if job.round != request["round"]:
            return -1
        if job.lost:
            return -len(job.lost)
        return min(len(job.waiting), job.nodes_max - len(job.in_place))

    def barrier(self, job: Job, request: Dict[str, Any]) -> Dict[str, str]:
        deadline = time.monotonic() + request["timeout"]
        if job.round == request["round"]:
            job.entries.setdefault(request["tag"], {})[request["node"]] = request["data"]
            entries = job.entries[request["tag"]]
            self.changed.notify_all()
        while True:
            if job.round == request["round"] and len(entries) == len(job.members):
                return entries
            if job.round != request["round"] or job.lost or len(job.in_place) < len(job.members):
                raise Failure("RoundEnded", "round %d is over" % request["round"])
            if deadline <= time.monotonic():
                raise Failure("RendezvousTimeout", "members did not enter the barrier")
            self.changed.wait(deadline - time.monotonic())

    def get_state(self, job: Job, request: Dict[str, Any]) -> Any:
        return [job.state, job.token] if job.state is not None else None

    def set_state(self, job: Job, request: Dict[str, Any]) -> Any:
        accepted = request["token"] == (job.token if job.state is not None else None)
        if accepted:
            job.state, job.token = request["state"], job.token + 1
        return [job.state, job.token, accepted]

    def is_closed(self, job: Job, request: Dict[str, Any]) -> bool:
        return job.closed

    def set_closed(self, job: Job, request: Dict[str, Any]) -> None:
        job.closed = True
        self.changed.notify_all()


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode(data: str) -> bytes:
    return base64.b64decode(data)
