"""Nodes of an elastic job on this machine, that tests add, remove and kill.

Each node is an agent (`steadfast run`) with one worker; one process (`steadfast rendezvous`) serves them all.
The program `steadfast` is the one on the PATH, or the one that the variable STEADFAST_BIN names.
"""

from __future__ import annotations

import http.client
import json
import os
import pathlib
import signal
import subprocess
import time
import uuid
from typing import Any, Callable

from coordinator import free_port

WAIT_SECONDS = 120
END_SECONDS = 10
POLL_SECONDS = 0.05

PROGRAM = os.environ.get("STEADFAST_BIN", "steadfast")
# Of an agent that SIGTERM has ended.
TERMINATED = 128 + signal.SIGTERM


class Process:
    """A process and all that it starts; they share the variable NODE, and end together."""

    def __init__(self, name: str, command: list[str], logs: pathlib.Path):
        self.name = name
        self.log = logs / f"{name}.log"
        self._mark = f"NODE={name}".encode()
        self._job = f"TEST_LOGS={logs}".encode()
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "NODE": name, "TEST_LOGS": str(logs)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """This process and all that it has started, as far as they have not ended."""
        return self._left()

    def reap(self) -> None:
        """Waits for this process, which was killed."""
        self._process.wait(END_SECONDS)

    def code(self) -> int | None:
        """The exit code, once the process has ended."""
        return self._process.poll()

    def end(self, signal_number: int) -> int:
        """Sends a signal; returns the exit code. Fails if any process is left; then it kills that."""
        self._process.send_signal(signal_number)
        try:
            code = self._process.wait(END_SECONDS)
            self._until_all_ended()
        finally:
            self._process.kill()
            self._process.wait()
            for pid in self._left():
                os.kill(pid, signal.SIGKILL)
        return code

    def _until_all_ended(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        while left := self._left():
            assert time.monotonic() < deadline, f"{self.name} has ended, but not {left}"
            time.sleep(POLL_SECONDS)

    def _left(self) -> list[int]:
        """The processes that have not ended, whether or not their parents have."""
        environments = pathlib.Path("/proc").glob("[0-9]*/environ")
        return [int(it.parent.name) for it in environments if self._is_ours(it)]

    def _is_ours(self, environ: pathlib.Path) -> bool:
        try:
            variables = environ.read_bytes().split(b"\0")
        except OSError:
            # It has ended, or belongs to another user.
            return False
        return self._mark in variables and self._job in variables


class Nodes:
    """The nodes of one job, all on the loopback; leaving the context ends every process.

    ``more`` are flags of the rendezvous.
    """

    def __init__(self, nodes_min: int, nodes_max: int, logs: pathlib.Path, *more: str):
        self._logs = logs
        rendezvous, self._admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self._job, self._etcd = f"test-{uuid.uuid4().hex[:8]}", rendezvous
        self._flags = ["--rdzv-id", self._job, "--nnodes", f"{nodes_min}:{nodes_max}"]
        listen = ["--listen", rendezvous, "--admin-listen", self._admin, "--last-call", "1s"]
        self._rendezvous = Process("rendezvous", [PROGRAM, "rendezvous", *self._flags, *listen, *more], logs)
        self._flags += ["--rdzv-endpoint", rendezvous, "--grace", "1s"]
        self._processes = [self._rendezvous]
        # Those that have neither left nor been killed.
        self._present = [self._rendezvous]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_) -> None:
        errors = []
        for process in reversed(self._present):
            try:
                process.end(signal.SIGKILL)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                errors.append(str(error))
        assert not errors, errors

    def add(self, command: list[str], *more: str) -> Process:
        """Starts a node, whose worker runs the command, with more flags."""
        name = f"node-{len(self._processes)}"
        log_dir = ["--log-dir", str(self._logs / name)]
        agent = [PROGRAM, "run", *self._flags, *log_dir, *more, "--", *command]
        node = Process(name, agent, self._logs)
        self._processes.append(node)
        self._present.append(node)
        return node

    def remove(self, node: Process) -> None:
        """Asks a node to leave, and waits until its processes have ended."""
        self._present.remove(node)
        assert node.end(signal.SIGTERM) == TERMINATED, self._tails()

    def kill(self, node: Process) -> None:
        """Kills the agent of a node, and waits until its worker has ended, too."""
        self._present.remove(node)
        node.end(signal.SIGKILL)

    def scale(self, workers: int | str) -> None:
        """Gives the job another number of workers, or ``"all"``."""
        command = [PROGRAM, "scale", "--job", self._job, "--etcd-endpoints", self._etcd, "--workers", str(workers)]
        subprocess.run(command, check=True, capture_output=True, timeout=END_SECONDS)

    def wait_round(self, world_size: int) -> None:
        """Waits until a round of that many workers runs."""

        def runs() -> bool:
            status = self.status()
            return (status.get("state"), status.get("world_size")) == ("running", world_size)

        self.until(runs, f"{world_size} workers")

    def wait(self) -> None:
        """Waits until all nodes have ended with success, and with them the job."""
        self.until(lambda: all(it.code() == 0 for it in self._present), "the end of all nodes")

    def until_failed(self) -> None:
        """Waits until all nodes have ended, and with them the job, because it failed."""
        ends, self._present = self._present, []
        try:
            self.until(lambda: all(it.code() is not None for it in ends), "the failure of the job")
        finally:
            self._present = [it for it in ends if it.code() is None]
        assert [it.code() for it in ends] == [1] * len(ends), self._tails()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Waits until a condition holds; fails with all logs if a node has failed before."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not holds():
            failed = [it.name for it in self._present if it.code() not in (None, 0)]
            assert not failed, f"waited for {what}: {failed} failed\n{self._tails()}"
            late = deadline < time.monotonic()
            assert not late, f"waited for {what}: not within {WAIT_SECONDS} seconds\n{self._tails()}"
            time.sleep(POLL_SECONDS)

    def status(self) -> dict[str, Any]:
        """What the rendezvous says of the job; nothing while it starts, and after it has ended."""
        connection = http.client.HTTPConnection(self._admin, timeout=5)
        try:
            connection.request("GET", "/status")
            return json.load(connection.getresponse())
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()

    def _tails(self) -> str:
        return "\n".join(f"{it.log}:\n{it.log.read_text(errors='replace')[-4000:]}" for it in self._processes)
