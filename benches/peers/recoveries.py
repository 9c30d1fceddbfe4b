"""Times how long a system stands still when one of its processes is killed."""

from __future__ import annotations

import json
import math
import pathlib
import sys
import tempfile
import time
from typing import Callable, Dict, List, NamedTuple, Union

import recovery
import steadfast
import task
import train_steadfast

HERE = pathlib.Path(__file__).parent
WAIT_SECONDS = recovery.WAIT_SECONDS
START_SECONDS = 120.0
STEPS_BEFORE = 40
PASSES = 1_000_000
"""More than are trained before the kill."""


Outcome = Union[float, str]
"""The seconds from the kill to the next step, infinite if there was none in time; or why there can be none."""


class Case(NamedTuple):
    name: str
    killed: str
    measure: Callable[[pathlib.Path], Outcome]


def steadfast_job(model: str, role: str, records: pathlib.Path, warm_spares: int = 0) -> float:
    size = task.SIZES["small"]
    job = train_steadfast.job(records, size, model, "sync", PASSES, "2s", warm_spares)
    with tempfile.TemporaryDirectory() as directory:
        with train_steadfast.start(job, pathlib.Path(directory)) as run:
            until(run, START_SECONDS, lambda it: it["checkpoint"] and STEPS_BEFORE <= it["version"])
            killed = time.time()
            run.kill(role)
            recovered: List[float] = []

            def has_recovered(status: dict) -> bool:
                # The master notes when the first step after a failure was completed.
                ends = [it["ended_unix_ms"] / 1000 for it in status["recoveries"]]
                recovered.extend(it for it in ends if killed < it)
                return bool(recovered)

            until(run, WAIT_SECONDS, has_recovered)
            return min(recovered, default=math.inf) - killed


def until(run: steadfast.LocalRun, seconds: float, condition: Callable[[dict], object]) -> None:
    """Waits for a state of the job, but not longer than that."""
    deadline = time.time() + seconds
    while time.time() < deadline:
        try:
            if condition(run.status()):
                return
        except steadfast.SteadfastError:
            # The job starts.
            pass
        time.sleep(0.01)


def agents(command: List[str], mode: str) -> Callable[[pathlib.Path], Outcome]:
    """Returns a measurement of one agent with all workers, one of which is killed."""

    def start(job: recovery.Job) -> None:
        workers = f"--nproc-per-node={recovery.WORKERS}"
        job.nodes.append(job.start("node-0", [*command, "--standalone", workers, *program(command), mode]))

    return lambda _: recovery.measure(recovery.Side(start), "worker").seconds


def program(command: List[str]) -> List[str]:
    """The training program, as the agent takes it."""
    return ["--", sys.executable, recovery.PROGRAM] if command[0] == "steadfast" else [recovery.PROGRAM]


def tensorflow(role: str, records: pathlib.Path) -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        logs = pathlib.Path(directory)
        command = [sys.executable, str(HERE / "recover_tensorflow.py"), str(records), role, str(WAIT_SECONDS)]
        process = recovery.Process("tensorflow", command, logs)
        try:
            deadline = time.monotonic() + START_SECONDS + WAIT_SECONDS
            while process.code() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            recovery.kill(process.pids())
            process.reap()
        file = logs / "recovery.json"
        return json.loads(file.read_text()) if file.exists() else "failed"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=9"]

CASES: List[Case] = [
    *(
        Case(name, killed, lambda records, model=model, role=role: steadfast_job(model, role, records))
        for name, model in (("Steadfast, built-in model", "built-in"), ("Steadfast, PyTorch trainers", "torch"))
        for killed, role in (("worker", "trainer"), ("parameter server", "pserver"))
    ),
    Case(
        "Steadfast, built-in model, `warm_spares = 2`",
        "parameter server",
        lambda records: steadfast_job("built-in", "pserver", records, warm_spares=2),
    ),
    Case("`steadfast run`, restart", "worker", agents(["steadfast", "run"], "restart")),
    Case("`steadfast run`, `steadfast.elastic`", "worker", agents(["steadfast", "run"], "in-process")),
    Case("`torchrun --standalone`", "worker", agents(TORCHRUN, "restart")),
    Case("ParameterServerStrategy", "worker", lambda records: tensorflow("worker", records)),
    Case("ParameterServerStrategy", "parameter server", lambda records: tensorflow("ps", records)),
]


class Times:
    """The samples of all cases."""

    def __init__(self) -> None:
        self._found: Dict[tuple, List[Outcome]] = {}

    def measure_all(self, records: pathlib.Path, say: Callable[[str], None]) -> None:
        for case in CASES:
            try:
                outcome = case.measure(records)
            except Exception as error:
                # That of one system does not end the benchmark.
                say(f"{case.name}: {error}")
                outcome = "failed"
            say(f"{case.name}, {case.killed} killed: {shown(outcome)}")
            self._found.setdefault((case.name, case.killed), []).append(outcome)

    def as_json(self) -> List[dict]:
        return [
            {"system": name, "killed": killed, "outcomes": [shown(it) for it in samples]}
            for (name, killed), samples in self._found.items()
        ]

    def print_table(self) -> None:
        print("\n| system | killed | to the next step (range) |\n|---|---|---|")
        for (name, killed), samples in self._found.items():
            ordered = sorted(samples, key=lambda it: math.inf if isinstance(it, str) else it)
            text = shown(ordered[len(ordered) // 2])
            ends = [shown(ordered[0]), shown(ordered[-1])]
            if ends[0] != ends[1]:
                text += f" ({ends[0]} to {ends[1]})"
            print(f"| {name} | {killed} | {text} |")


def shown(outcome: Outcome) -> str:
    if isinstance(outcome, str):
        return outcome
    return f"none within {WAIT_SECONDS:.0f} s" if outcome == math.inf else f"{outcome:.2f} s"
