"""Compares closures of steadfast.Coordinator with those of TensorFlow's ClusterCoordinator.

Each side has four workers of one thread. Closures are empty, or read a variable of 1 000 values on a parameter server
and add to it. A run is a process of its own: closures.py SIDE DIRECTORY, which writes what it has measured to a file
there.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "python"))

import recovery  # noqa: E402

WORKERS = 4
CLOSURES = 2000
LATENCIES = 300
LIMIT_SECONDS = 180
START_SECONDS = 60

SIDES = {
    "steadfast": "Steadfast, `Coordinator`",
    "named": "Steadfast, `Coordinator`, each closure with a name, results in etcd",
    "tensorflow": "TensorFlow, `ClusterCoordinator`",
    "pushing": "Steadfast, closures that pull and push",
    "named-pushing": "Steadfast, closures that pull and push, each with a name",
    "tensorflow-variables": "TensorFlow, closures that read a variable and add to it",
}

BASES = {side: "tensorflow-variables" if "push" in side or "variables" in side else "tensorflow" for side in SIDES}
"""The side of TensorFlow that each side is compared with."""

VALUES = 1000
"""Values of the variable."""

JOB = """
name = "bench"
mode = "async"
model = { kind = "closures" }
learning_rate = { base = 1.0 }
"""


def nothing() -> None:
    """What a worker of ours runs."""


def adds() -> None:
    """What a worker of ours runs with a variable."""
    import steadfast

    closure = steadfast.current_closure()
    closure.push({"w": -1e-6 * closure.get_parameters()["w"]})


def measured(schedule: Callable[[], Any], join: Callable[[], None]) -> Dict[str, float]:
    """Returns closures per second, and the median milliseconds from a call to its result."""
    for _ in range(50):
        schedule()
    join()
    begun = time.perf_counter()
    for _ in range(CLOSURES):
        schedule()
    join()
    rate = CLOSURES / (time.perf_counter() - begun)
    latencies = []
    for _ in range(LATENCIES):
        begun = time.perf_counter()
        schedule().fetch()
        latencies.append(time.perf_counter() - begun)
    return {"rate": rate, "milliseconds": 1000 * statistics.median(latencies)}


def report(directory: pathlib.Path, found: Dict[str, float]) -> None:
    (directory / "result.json").write_text(json.dumps(found))


def wait_for(log: pathlib.Path, text: str) -> None:
    end = time.monotonic() + START_SECONDS
    while text not in log.read_text():
        if end < time.monotonic():
            raise TimeoutError(f"no `{text}` in {log}")
        time.sleep(0.02)


def of_steadfast(directory: pathlib.Path, named: bool, pushes: bool) -> Dict[str, float]:
    import closures  # The workers know the function by this module.
    import steadfast

    addresses = [recovery.free_address() for _ in range(WORKERS)]
    etcd = recovery.free_address()
    worker = [sys.executable, "-m", "steadfast.worker", str(HERE / "closures.py"), "--etcd-endpoints", etcd]
    commands: List[Tuple[str, List[str]]] = [(it, [*worker, "--listen", it]) for it in addresses]
    if named or pushes:
        commands.append((etcd, ["steadfast", "etcd", "--listen", etcd, "--data-dir", str(directory / "etcd")]))
    if pushes:
        (directory / "bench.toml").write_text(JOB)
        run = ["local", "bench.toml", "--pservers", "1", "--etcd", etcd, "--data-dir", "job"]
        commands.append(("local:job", ["steadfast", *run]))
    processes = []
    try:
        for name, command in commands:
            log = directory / f"{name.rpartition(':')[2]}.log"
            with open(log, "w") as file:
                processes.append(subprocess.Popen(command, stdout=file, stderr=file, cwd=directory))
        for address in addresses:
            wait_for(directory / f"{address.rpartition(':')[2]}.log", "listens on")
        job: Dict[str, Any] = {"job": "bench", "endpoints": etcd} if named or pushes else {}
        if pushes:
            job["parameters"] = {"w": [1.0] * VALUES}
        with steadfast.Coordinator(addresses, **job) as coordinator:
            while not all(worker.threads for worker in coordinator.workers):
                time.sleep(0.01)
            numbers = iter(range(1 << 30))

            def schedule() -> Any:
                name = str(next(numbers)) if named else None
                return coordinator.schedule(closures.adds if pushes else closures.nothing, name=name)

            return measured(schedule, coordinator.join)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def of_tensorflow(directory: pathlib.Path, with_variable: bool) -> None:
    """Writes what it has measured, and ends this process."""
    import task

    task.WORKERS, task.PSERVERS = WORKERS, 1
    import train_tensorflow
    from train_tensorflow import tf

    cluster, servers = train_tensorflow.start_all()
    try:
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

        @tf.function
        def closure():
            return tf.constant(0)

        with strategy.scope():
            variable = tf.Variable(tf.ones(VALUES))

        @tf.function
        def adding():
            variable.assign_add(1e-6 * variable)

        chosen = adding if with_variable else closure
        report(directory, measured(lambda: coordinator.schedule(chosen), coordinator.join))
    finally:
        train_tensorflow.end(servers)


def run(side: str, directory: pathlib.Path) -> Dict[str, float]:
    """Runs one side in a process of its own; returns what it has measured, or nothing if it failed."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / "closures.py"), side, str(directory)]
    process = recovery.Process(f"closures-{side}", command, directory)
    end = time.monotonic() + LIMIT_SECONDS
    try:
        while process.code() is None and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        # Also what it has started.
        recovery.kill(process.pids())
        process.reap()
    result = directory / "result.json"
    return json.loads(result.read_text()) if result.exists() else {}


def compare(rounds: int, directory: pathlib.Path, say: Callable[[str], None]) -> None:
    """Prints a table of all sides, with medians and ranges of the rounds."""
    found: Dict[str, List[Dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES:
            sample = run(side, directory / f"{side}-{number}")
            say(f"round {number + 1}, {SIDES[side]}: {sample or 'failed'}")
            found[side].append(sample)
    print(f"\nclosures: {WORKERS} workers, {CLOSURES} closures, empty or with a variable of {VALUES} values\n")
    print("| system | closures per second (range) | relative to TensorFlow | milliseconds for one, median |")
    print("|---|---|---|---|")
    for side, samples in found.items():
        rates = sorted(it["rate"] for it in samples if it)
        if not rates:
            print(f"| {SIDES[side]} | failed | | |")
            continue
        pairs = zip(samples, found[BASES[side]])
        ratios = [it["rate"] / base["rate"] for it, base in pairs if it and base]
        ratio = f"{statistics.median(ratios):.1f}" if ratios else ""
        latency = statistics.median(it["milliseconds"] for it in samples if it)
        shown = f"{statistics.median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f})"
        print(f"| {SIDES[side]} | {shown} | {ratio} | {latency:.2f} |")


def main() -> None:
    side, directory = sys.argv[1], pathlib.Path(sys.argv[2])
    if side.startswith("tensorflow"):
        of_tensorflow(directory, with_variable="variables" in side)
    else:
        report(directory, of_steadfast(directory, named="named" in side, pushes="pushing" in side))


if __name__ == "__main__":
    main()
