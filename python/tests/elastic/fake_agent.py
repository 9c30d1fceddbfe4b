"""The agent of :mod:`steadfast._native`, as a client of the service for tests."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import types
from collections import namedtuple
from typing import Any, Dict, List, Optional, Tuple

import fake_service as service

Round = namedtuple("Round", "round rank first_rank world_size members")
numbers = itertools.count()


class Agent:
    def __init__(
        self,
        endpoints: List[str],
        job: str,
        *,
        address: str,
        slots: int,
        nodes_min: int,
        nodes_max: int,
        settings: Dict[str, str],
    ) -> None:
        host, _, port = endpoints[0].rpartition(":")
        self._endpoint = (host, int(port))
        self._common = {
            "job": job,
            "node": f"{os.getpid()}-{next(numbers)}",
            "nodes_min": nodes_min,
            "nodes_max": nodes_max,
        }
        self._lease: Optional[socket.socket] = self._connect()
        self._ask(self._lease, "register", address=address, slots=slots, settings=settings)

    def join(self, after: int, timeout: float) -> Round:
        number, rank, members = self._call("join", after=after, timeout=timeout)
        return Round(number, rank, rank, len(members), [tuple(it) for it in members])

    def waiting(self, round: int) -> int:
        return self._call("waiting", round=round)

    def barrier(self, round: int, tag: str, data: bytes, timeout: float) -> Dict[str, bytes]:
        answer = self._call(
            "barrier", round=round, tag=tag, data=service.encode(data), timeout=timeout
        )
        return {node: service.decode(it) for node, it in answer.items()}

    def get_state(self) -> Optional[Tuple[bytes, int]]:
        answer = self._call("get_state")
        return None if answer is None else (service.decode(answer[0]), answer[1])

    def set_state(self, state: bytes, token: Optional[int]) -> Tuple[bytes, int, bool]:
        now, token, accepted = self._call("set_state", state=service.encode(state), token=token)
        return service.decode(now), token, accepted

    def is_closed(self) -> bool:
        return self._call("is_closed")

    def set_closed(self) -> None:
        self._call("set_closed")

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _connect(self) -> socket.socket:
        import steadfast

        try:
            return socket.create_connection(self._endpoint)
        except OSError as error:
            raise steadfast.UnavailableError(
                f"no master answers at {self._endpoint}: {error}"
            ) from error

    def _call(self, call: str, **arguments: Any) -> Any:
        with self._connect() as connection:
            return self._ask(connection, call, **arguments)

    def _ask(self, connection: socket.socket, call: str, **arguments: Any) -> Any:
        import steadfast

        connection.sendall(json.dumps({"call": call, **self._common, **arguments}).encode() + b"\n")
        received = b""
        while not received.endswith(b"\n"):
            more = connection.recv(65536)
            if not more:
                raise steadfast.UnavailableError("the service ended")
            received += more
        answer = json.loads(received)
        if "error" in answer:
            raise getattr(steadfast, answer["error"])(answer["message"])
        return answer["ok"]


def install() -> None:
    """Replaces the agent of the extension module; without it, the whole module."""
    try:
        import steadfast._native as native
    except ImportError:
        native = types.ModuleType("steadfast._native")
        sys.modules["steadfast._native"] = native

        def missing(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        native.__getattr__ = missing
    native.Agent = Agent
