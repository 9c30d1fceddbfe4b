"""Nodes of an elastic job on this machine, that tests add, remove and kill."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import time
from typing import Callable

WAIT_SECONDS = 120
POLL_SECONDS = 0.05


@dataclasses.dataclass(eq=False)
class Node:
    """One node: the address of its worker, and the output of its worker."""

    address: str
    command: list[str]
    log: pathlib.Path


class Nodes:
    """The nodes of one job, all on the loopback; leaving the context ends every process."""

    def __init__(self, nodes_min: int, nodes_max: int, logs: pathlib.Path):
        self._logs = logs
        self._nodes: list[Node] = []
        self._launcher = _StandIn(nodes_min, nodes_max)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_) -> None:
        self._launcher.close()

    def add(self, command: list[str]) -> Node:
        """Starts a node, whose worker runs the command."""
        log = self._logs / f"node-{len(self._nodes)}.log"
        node = Node(_free_address(), command, log)
        self._nodes.append(node)
        self._launcher.add(node)
        return node

    def remove(self, node: Node) -> None:
        """Asks a node to leave, and waits until its processes have ended."""
        self._launcher.remove(node)

    def kill(self, node: Node) -> None:
        """Kills a node with its worker, as a power failure does."""
        self._launcher.kill(node)

    def wait_round(self, world_size: int) -> None:
        """Waits until that many workers have been started together."""
        self.until(lambda: self._launcher.world_size() == world_size, f"{world_size} workers")

    def wait(self) -> None:
        """Waits until all nodes have ended with success."""
        self.until(self._launcher.has_ended, "the end of all nodes")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Waits until a condition holds; fails with all logs if a node has failed before."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            failure = self._launcher.failure()
            if failure is None and holds():
                return
            if failure is None and deadline < time.monotonic():
                failure = f"not within {WAIT_SECONDS} seconds"
            assert failure is None, f"waited for {what}: {failure}\n{self._tails()}"
            time.sleep(POLL_SECONDS)

    def _tails(self) -> str:
        logs = [it.log for it in self._nodes if it.log.exists()]
        return "\n".join(f"{it}:\n{it.read_text(errors='replace')[-4000:]}" for it in logs)


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


class _StandIn:
    """Stands in for agents: starts all workers again when the set of nodes changes.

    It decides only while a test waits, in `failure`.
    """

    RESTARTS_MAX = 3

    def __init__(self, nodes_min: int, nodes_max: int):
        self._nodes_min = nodes_min
        self._nodes_max = nodes_max
        self._present: list[Node] = []
        self._round: list[Node] = []
        self._workers: dict[Node, subprocess.Popen] = {}
        self._restarts = 0

    def add(self, node: Node) -> None:
        self._present.append(node)

    def remove(self, node: Node) -> None:
        self._present.remove(node)
        if node in self._workers:
            _kill_group(self._workers[node])
            self._workers.pop(node).wait()

    # A stand-in has no failure detector that could tell the two apart.
    kill = remove

    def world_size(self) -> int:
        return len(self._round) if self._round == self._members() else 0

    def has_ended(self) -> bool:
        return all(it.poll() == 0 for it in self._workers.values())

    def failure(self) -> str | None:
        """Starts workers if that is due; returns what has failed for good."""
        codes = [it.poll() for it in self._workers.values()]
        members = self._members()
        if self._round != members:
            if self._nodes_min <= len(members):
                self._start(members)
        elif any(it not in (None, 0) for it in codes):
            if self._restarts == self.RESTARTS_MAX:
                return f"workers have ended with {codes}"
            self._restarts += 1
            self._start(members)
        return None

    def close(self) -> None:
        # Kills all before it waits for any.
        for worker in self._workers.values():
            _kill_group(worker)
        for worker in self._workers.values():
            worker.wait()
        self._workers = {}

    def _members(self) -> list[Node]:
        return self._present[: self._nodes_max]

    def _start(self, members: list[Node]) -> None:
        self.close()
        self._round = members
        addresses = [it.address for it in members]
        for rank, node in enumerate(members):
            task = dict(type="worker", index=rank)
            given = dict(cluster=dict(worker=addresses), task=task)
            variables = dict(
                TF_CONFIG=json.dumps(given), RANK=str(rank), WORLD_SIZE=str(len(members))
            )
            with open(node.log, "ab") as log:
                self._workers[node] = subprocess.Popen(
                    node.command,
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )


def _kill_group(worker: subprocess.Popen) -> None:
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
