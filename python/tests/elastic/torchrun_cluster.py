"""The processes of a job for `torchrun`: its coordinator, and nodes that run `torchrun`."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
from typing import Any, Callable, Dict, List, Optional

from coordinator import free_port

HERE = pathlib.Path(__file__).parent
SCRIPT = HERE / "train_until_finished.py"
SECONDS_MAX = 120.0
"""Enough for a machine that is busy with something else. No test waits for a time to pass."""

Event = Dict[str, Any]


def program(name: str) -> str:
    """Returns a program of this package: beside Python, or elsewhere in the path."""
    places = [os.environ.get("STEADFAST_BIN"), sysconfig.get_path("scripts"), os.environ["PATH"]]
    for place in filter(None, places):
        found = shutil.which(name, path=place)
        if found:
            return found
    raise FileNotFoundError(f"{name} is not installed")


def until(holds: Callable[[], bool], explain: Callable[[], str], seconds: float = SECONDS_MAX) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)


class Process:
    """A process, and what it wrote."""

    def __init__(self, name: str, command: List[str], directory: pathlib.Path, **env: str) -> None:
        self.name, self.log = name, directory / f"{name}.log"
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **env},
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def ends(self) -> int:
        try:
            return self._process.wait(SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end:\n{self.text()[-6000:]}") from None

    def kill(self) -> None:
        if self.is_running():
            self._process.kill()
        self._process.wait()

    def says(self, pattern: str) -> str:
        """Waits until it has written this, and returns its group."""
        until(
            lambda: bool(re.search(pattern, self.text())) or not self.is_running(),
            lambda: f"{self.name} does not say {pattern}:\n{self.text()}",
        )
        found = re.search(pattern, self.text())
        assert found, f"{self.name} has ended without {pattern}:\n{self.text()}"
        return found.group(1)


class Coordinator:
    """`steadfast rendezvous`: etcd and the master of one job, in one process."""

    def __init__(self, directory: pathlib.Path, job: str, nnodes: str, last_call: str, join_timeout: str) -> None:
        self._admin = f"127.0.0.1:{free_port()}"
        command = [program("steadfast"), "rendezvous", "--rdzv-id", job]
        command += ["--nnodes", nnodes, "--last-call", last_call, "--join-timeout", join_timeout]
        command += ["--listen", "127.0.0.1:0", "--admin-listen", self._admin]
        self.process = Process("rendezvous", command, directory)
        self.endpoint = self.process.says(r"--rdzv-endpoint (\S+)")

    def status(self) -> Optional[Dict[str, Any]]:
        return _status(self._admin)

    def processes(self) -> List[Process]:
        return [self.process]

    def close(self) -> None:
        self.process.kill()


class Masters:
    """Two masters of one job over etcd, of which one is acting."""

    def __init__(self, directory: pathlib.Path, job: str, nnodes: str, last_call: str, join_timeout: str) -> None:
        minimum, _, maximum = nnodes.partition(":")
        spec = directory / "job.toml"
        spec.write_text(
            f'name = "{job}"\nkind = "elastic"\n[nodes]\nmin = {minimum}\nmax = {maximum or minimum}\n'
            f'last_call = "{last_call}"\njoin_timeout = "{join_timeout}"\n'
        )
        self._directory = directory
        command = [program("steadfast"), "etcd", "--listen", "127.0.0.1:0"]
        self.etcd = Process("etcd", [*command, "--data-dir", str(directory / "etcd")], directory)
        self._masters: List[Process] = []
        self._admins: Dict[str, str] = {}
        try:
            self.endpoint = self.etcd.says(r"embedded etcd serving address=(\S+)")
            self._command = [program("steadfast-master"), "--job", job, "--job-file", str(spec)]
            self._command += ["--etcd-endpoints", f"http://{self.endpoint}", "--lease-ttl", "2s"]
            self.start_master()
            self.start_master()
        except BaseException:
            self.close()
            raise

    def start_master(self) -> None:
        name, admin = f"master-{len(self._masters)}", f"127.0.0.1:{free_port()}"
        self._admins[name] = admin
        command = [*self._command, "--admin-listen", admin]
        self._masters.append(Process(name, command, self._directory))

    def acting(self) -> Process:
        """Returns the acting master, as soon as there is one."""
        acts = lambda it: it.is_running() and self._serves(it)  # noqa: E731
        until(lambda: any(map(acts, self._masters)), lambda: "no master acts")
        return next(filter(acts, self._masters))

    def status(self) -> Optional[Dict[str, Any]]:
        found = [_status(self._admins[it.name]) for it in self._masters if it.is_running()]
        return next((it for it in found if it and "nodes" in it), None)

    def _serves(self, master: Process) -> bool:
        return "nodes" in (_status(self._admins[master.name]) or {})

    def processes(self) -> List[Process]:
        return [self.etcd, *self._masters]

    def close(self) -> None:
        for it in self.processes():
            it.kill()


def _status(admin: str) -> Optional[Dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://{admin}/status", timeout=5) as answer:
            return json.load(answer)
    except OSError:
        return None


class Cluster:
    """The nodes of one job, and the events that their workers wrote down."""

    def __init__(
        self,
        directory: pathlib.Path,
        backend: str,
        nnodes: str,
        *,
        service: Any = Coordinator,
        last_call: str = "30s",
        join_timeout: str = "10m",
        script: str = "wait",
    ) -> None:
        self.directory, self.backend, self.nnodes, self.script = directory, backend, nnodes, script
        self.nodes: List[Process] = []
        self.service = service(directory, "digits", nnodes, last_call, join_timeout)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()
        for worker in self.workers():
            os.kill(worker, signal.SIGKILL)
        self.service.close()

    def start(self, *names: str, conf: str = "", **flags: Any) -> List[Process]:
        """Starts nodes. `flags` are those of torchrun."""
        given = {
            "rdzv-backend": self.backend,
            "rdzv-id": "digits",
            "rdzv-endpoint": self.service.endpoint,
            "nnodes": self.nnodes,
            "nproc-per-node": 1,
            "max-restarts": 3,
            "monitor-interval": 0.1,
            **{key.replace("_", "-"): value for key, value in flags.items()},
        }
        if self.backend == "steadfast-c10d":
            conf = conf or "last_call_timeout=1"
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += [f"--{key}={value}" for key, value in given.items()]
        command += [f"--rdzv-conf={conf}"] if conf else []
        command += [str(SCRIPT), self.script, str(self.directory)]
        environment = {
            "LOGLEVEL": "INFO",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        started = [Process(name, command, self.directory, NODE=name, **environment) for name in names]
        self.nodes += started
        return started

    def events(self, event: str = "") -> List[Event]:
        path = self.directory / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        return [it for it in map(json.loads, lines) if event in ("", it["event"])]

    def running(self, nodes: str) -> List[Event]:
        """Waits until these nodes train together, and returns their workers by rank."""

        def newest() -> List[Event]:
            found = {it["node"]: it for it in self.events("started")}
            return [it for it in found.values() if it["node"] in nodes]

        def together() -> bool:
            workers = newest()
            rounds = {(it["world_size"], it["store"]) for it in workers}
            return len(workers) == len(nodes) and rounds == {(len(nodes), workers[0]["store"])}

        self.until(together)
        return sorted(newest(), key=lambda it: it["rank"])

    def until(self, holds: Callable[[], bool]) -> None:
        until(holds, self.logs)

    def waits(self, nodes: int) -> None:
        """Waits until so many nodes wait for the next round."""

        def waiting() -> int:
            status = self.service.status() or {"nodes": []}
            return [it["state"] for it in status["nodes"]].count("waiting")

        self.until(lambda: waiting() == nodes)

    def fail_worker(self, node: str) -> None:
        (self.directory / f"fail-{node}").touch()

    def finish(self, *nodes: Process) -> None:
        """Lets the workers finish. All these nodes succeed."""
        (self.directory / "finish").touch()
        codes = {node.name: node.ends() for node in nodes}
        assert set(codes.values()) == {0}, f"{codes}\n{self.logs()}"

    def workers(self) -> List[int]:
        """Returns the workers that run."""
        found = []
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                arguments = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            # torchrun has these arguments, too, after its own.
            if arguments[2:3] == [str(SCRIPT).encode()] and str(self.directory).encode() in arguments:
                found.append(int(process.name))
        return found

    def logs(self) -> str:
        # A name that was used again has one log.
        logs = {it.name: it for it in [*self.service.processes(), *self.nodes]}.values()
        return "\n".join(f"== {it.name}\n{it.text()[-6000:]}" for it in logs)
