"""Times how long a job of three nodes stands still when a worker, or a whole node, is killed."""

from __future__ import annotations

import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Callable, Dict, List, NamedTuple, Optional

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "python" / "tests" / "elastic"), str(ROOT / "python" / "tests")]

from nodes import Process  # noqa: E402

from coordinator import free_port  # noqa: E402

WORKERS = 3
"""Each on a node of its own, except with dlrover-run."""
STEPS_BEFORE = 40
WAIT_SECONDS = 60.0
POLL_SECONDS = 0.01

PROGRAM = str(HERE / "recover.py")


def free_address() -> str:
    """An address of this machine at which nothing listens."""
    return f"127.0.0.1:{free_port()}"


class Recovery(NamedTuple):
    seconds: float
    """From the kill to the next step in all other workers; infinite if there was none in time."""
    imports: float
    """The part of it in which a new process imported PyTorch."""


class Job:
    """The nodes of one job, and what their workers log."""

    def __init__(self, logs: pathlib.Path):
        self.logs = logs
        self.servers: List[Process] = []
        self.nodes: List[Process] = []

    def start(self, name: str, command: List[str]) -> Process:
        return Process(name, command, self.logs)

    def events(self, worker: str) -> List[dict]:
        """What all processes of a worker (`<node>.<local rank>`) have logged, by time."""
        found: List[dict] = []
        for file in self.logs.glob(f"{worker}-*.jsonl"):
            # The last line may be incomplete.
            lines = file.read_text().split("\n")[:-1]
            found += [json.loads(line) for line in lines]
        return sorted(found, key=lambda it: it["time"])

    def workers(self) -> List[str]:
        return sorted({it.name.rpartition("-")[0] for it in self.logs.glob("*.jsonl")})

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not holds():
            if deadline < time.monotonic():
                tails = [it.log.read_text(errors="replace")[-2000:] for it in self.servers + self.nodes]
                raise TimeoutError(f"waited {WAIT_SECONDS:.0f} s for {what}\n" + "\n".join(tails))
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        for process in self.nodes + self.servers:
            kill(process.pids())
            process.reap()


def kill(pids: List[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def steadfast(job: Job, mode: str, *more: str) -> None:
    at, flags = free_address(), ["--rdzv-id", "bench", "--nnodes", f"2:{WORKERS}"]
    job.servers.append(job.start("rendezvous", ["steadfast", "rendezvous", *flags, "--listen", at]))
    for number in range(WORKERS):
        agent = ["steadfast", "run", *flags, "--rdzv-endpoint", at, *more, "--", sys.executable, PROGRAM, mode]
        job.nodes.append(job.start(f"node-{number}", agent))


def torchrun(job: Job) -> None:
    at = free_address()
    for number in range(WORKERS):
        agent = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-id=bench"]
        agent += [f"--rdzv-endpoint={at}", f"--nnodes=2:{WORKERS}", "--max-restarts=9", PROGRAM, "restart"]
        job.nodes.append(job.start(f"node-{number}", agent))
        if number == 0:
            # It serves the store, whichever node is first.
            time.sleep(1.0)


def dlrover(job: Job) -> None:
    """One node with all workers: several would need a master on Kubernetes or Ray."""
    agent = [str(DLROVER), "--standalone", "--nnodes=1", f"--nproc-per-node={WORKERS}", "--max-restarts=9"]
    job.nodes.append(job.start("node-0", [*agent, PROGRAM, "restart"]))


def are_warm(job: Job) -> bool:
    return all("a warm worker is ready" in it.log.read_text(errors="replace") for it in job.nodes)


class Side(NamedTuple):
    start: Callable[[Job], None]
    kills: tuple = ("worker", "node")
    is_ready: Callable[[Job], bool] = lambda _: True
    """Whether a job that trains is as it is for most of its time."""


WARM = ["--warm-workers", "1"]
SIDES: Dict[str, Side] = {
    "steadfast run, restart": Side(lambda job: steadfast(job, "restart")),
    "steadfast run, steadfast.elastic": Side(lambda job: steadfast(job, "in-process")),
    "steadfast run --warm-workers 1, restart": Side(lambda job: steadfast(job, "restart", *WARM), is_ready=are_warm),
    "steadfast run --warm-workers 1, steadfast.elastic": Side(
        lambda job: steadfast(job, "in-process", *WARM), is_ready=are_warm
    ),
    "torchrun, c10d": Side(torchrun),
    "dlrover-run": Side(dlrover, ("worker",)),
}

DLROVER = ROOT / "target" / "python-dlrover" / "bin" / "dlrover-run"
# Version 0.6.1 does not start with PyTorch 2.9 or newer, and does not list what else it imports.
DLROVER_PACKAGES = ["dlrover==0.6.1", "torch==2.7.1", "grpcio", "protobuf", "psutil", "kubernetes", "ray", "deprecated"]


def install_dlrover() -> bool:
    """Installs dlrover-run in an environment of its own (5 GB); says so if that fails."""
    if DLROVER.exists():
        return True
    environment = DLROVER.parents[1]
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", *DLROVER_PACKAGES]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        subprocess.run(pip, check=True)
    except subprocess.CalledProcessError as error:
        print(f"elastic: dlrover-run is not measured: {error}", flush=True)
        return False
    return True


def measure(side: Side, what: str) -> Recovery:
    """Starts a job, kills a worker or a node, and waits for the next step of all other nodes."""
    with tempfile.TemporaryDirectory() as directory:
        job = Job(pathlib.Path(directory))
        try:
            side.start(job)

            def steps(worker: str) -> int:
                return sum(it["event"] == "step" for it in job.events(worker))

            def all_train() -> bool:
                workers = job.workers()
                return len(workers) == WORKERS and all(STEPS_BEFORE <= steps(it) for it in workers)

            job.until(all_train, "the first steps")
            job.until(lambda: side.is_ready(job), "the warm workers")
            # The last node has one worker if there are others. With c10d, the first one serves the store.
            workers = job.workers()
            victim, others = workers[-1], workers[:-1]
            pids = job.nodes[-1].pids() if what == "node" else [job.events(victim)[-1]["pid"]]
            killed = time.time()
            kill(pids)
            try:
                job.until(lambda: all(next_step(job.events(it), killed) for it in others), "the next step")
            except TimeoutError:
                return Recovery(math.inf, 0.0)
            recovered = max(next_step(job.events(it), killed) or 0 for it in others)
            imports = [
                it["seconds"]
                for worker in workers
                for it in job.events(worker)
                if it["event"] == "imported" and killed < it["time"] < recovered
            ]
            return Recovery(recovered - killed, max(imports, default=0.0))
        finally:
            job.close()


def next_step(events: List[dict], killed: float) -> Optional[float]:
    """Returns when a worker did its first step in a group that was formed after the kill."""
    has_joined = False
    for event in events:
        if event["time"] <= killed:
            continue
        has_joined |= event["event"] == "joined"
        if has_joined and event["event"] == "step":
            return float(event["time"])
    return None


def compare(rounds: int, with_dlrover: bool) -> None:
    """Alternates between all sides, and prints medians."""
    sides = dict(SIDES)
    if not (with_dlrover and install_dlrover()):
        del sides["dlrover-run"]
    found: Dict[tuple, List[Recovery]] = {}
    for _ in range(rounds):
        for what in ("worker", "node"):
            for name, side in sides.items():
                if what in side.kills:
                    sample = measure(side, what)
                    found.setdefault((what, name), []).append(sample)
    for (what, name), samples in found.items():
        head = f"elastic, kill -9 of a {what}, {name}:"
        total = statistics.median(it.seconds for it in samples)
        if total == math.inf:
            print(f"{head} no step of all others within {WAIT_SECONDS:.0f} s", flush=True)
            continue
        imports = statistics.median(it.imports for it in samples)
        rest = sorted(it.seconds - it.imports for it in samples)
        print(
            f"{head} {total:.2f} s to the next step of all others; PyTorch's import {imports:.2f} s, the rest "
            f"{statistics.median(rest):.2f} s ({rest[0]:.2f} to {rest[-1]:.2f})",
            flush=True,
        )
