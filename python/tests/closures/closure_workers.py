"""Workers that run closures, as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Callable, Dict, List, Optional

from ports import free_port

HERE = pathlib.Path(__file__).parent
START_SECONDS = 60
END_SECONDS = 20


def until(holds: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    """Waits until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.01)


class Process:
    """A process with a log."""

    def __init__(self, command: List[str], log: pathlib.Path, env: Optional[Dict[str, str]] = None) -> None:
        self.log = log
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        self.pid = self._process.pid

    def output(self) -> str:
        """What the process has written."""
        return self.log.read_text()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(END_SECONDS)

    def code(self) -> Optional[int]:
        """The exit code, once the process has ended."""
        return self._process.poll()

    def wait(self, seconds: float = START_SECONDS) -> int:
        return self._process.wait(seconds)

    def end(self) -> None:
        if self._process.poll() is None:
            self.kill()


class Cluster:
    """Workers, by address, that are started and killed."""

    def __init__(self, logs: pathlib.Path) -> None:
        self.logs = logs
        self._workers: Dict[str, Process] = {}
        self._others: List[Process] = []

    def start(self, modules: str = str(HERE / "steps.py"), *args: str, address: Optional[str] = None) -> str:
        """Starts a worker, and waits until it listens; returns its address."""
        address = address or f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "steadfast.worker", modules, "--listen", address, *args]
        log = self.logs / f"{address.rpartition(':')[2]}.log"
        log.unlink(missing_ok=True)
        process = self._workers[address] = Process(command, log)
        until(lambda: "listens on" in process.output() or process.code() is not None)
        assert process.code() is None, process.output()
        return address

    def __getitem__(self, address: str) -> Process:
        return self._workers[address]

    def run(self, command: List[str], name: str, env: Optional[Dict[str, str]] = None) -> Process:
        """Starts another process."""
        process = Process(command, self.logs / f"{name}.log", env)
        self._others.append(process)
        return process

    def end(self) -> None:
        for process in [*self._workers.values(), *self._others]:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGCONT)
            process.end()
