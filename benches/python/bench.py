"""Measures trainers in PyTorch against the limit of the same machine; see docs/performance.md.

make bench-python
make bench-python ARGS="--rounds 5 --only ddp"
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Callable, Dict, List

import ddp
import numpy as np
import recovery
import steadfast
import steadfast.run
import torch
from perceptron import perceptron

HERE = pathlib.Path(__file__).parent
FEATURES, CLASSES, RECORDS = 64, 10, 1 << 14
TRAINERS, BATCH = 2, 64
"""Processes, and records of each in a step."""

HIDDEN = {"1m": [1024, 1024], "25m": [5000, 5000]}
"""Widths of the hidden layers, for 1.1 and 25.4 million parameters."""

STEPS = {"1m": 600, "25m": 60}


def write_records(file: pathlib.Path) -> None:
    generator = np.random.default_rng(0)
    features = generator.standard_normal((RECORDS, FEATURES), dtype=np.float32)
    label = features[:, :CLASSES].argmax(axis=1)
    header = ",".join([f"x{i}" for i in range(FEATURES)] + ["label"])
    table = np.column_stack([features, label])
    np.savetxt(file, table, fmt=["%.5f"] * FEATURES + ["%d"], delimiter=",", header=header, comments="")


def job(name: str, data: pathlib.Path, steps: int, model: Dict[str, object], lanes: int) -> steadfast.Job:
    return steadfast.Job(
        name=name,
        steps=steps,
        dataset=dict(source=data, format="csv", features=["x*"], label="label"),
        model=dict(kind="python", **model),
        learning_rate=dict(base=0.01),
        sync=dict(lanes=lanes, micro_batch=BATCH),
        checkpoint=dict(every="1h"),
    )


def ours(size: str, data: pathlib.Path, directory: pathlib.Path) -> float:
    """Steps per second of two trainers and two parameter servers."""
    model = dict(entry="models:build", options=dict(hidden=HIDDEN[size], classes=CLASSES))
    run = steadfast.local(
        job(f"bench-{size}", data, STEPS[size], model, TRAINERS),
        trainers=TRAINERS,
        pservers=2,
        data_dir=directory,
        progress=False,
    )
    with run:
        run.wait()
    curves = run.curves()
    points = [(s, v) for s, v in zip(curves["seconds"], curves["step"]) if STEPS[size] // 10 <= v]
    (start, first), (end, last) = points[0], points[-1]
    return (last - first) / (end - start)


def replica(rank: int, size: str, port: int, file: str) -> None:
    """One process of DistributedDataParallel; the first one writes the steps per second."""
    torch.manual_seed(0)
    features = torch.randn(RECORDS, FEATURES)
    label = features[:, :CLASSES].argmax(dim=1)
    starts = [(TRAINERS * step + rank) * BATCH % (RECORDS - BATCH) for step in range(STEPS[size])]
    batches = ((features[at : at + BATCH], label[at : at + BATCH]) for at in starts)
    net = perceptron(FEATURES, HIDDEN[size], CLASSES)
    warm_up = STEPS[size] // 10
    start, end = ddp.train(net, batches, 0.01, warm_up, rank, TRAINERS, port)
    if rank == 0:
        pathlib.Path(file).write_text(str((STEPS[size] - warm_up) / (end - start)))
    # Threads of gloo that are left sometimes abort a process that ends otherwise.
    os._exit(0)


def theirs(size: str, directory: pathlib.Path) -> float:
    port = recovery.free_port()
    file = directory / "ddp"
    torch.multiprocessing.spawn(replica, (size, port, str(file)), nprocs=TRAINERS)
    return float(file.read_text())


def fixed_order(size: str, directory: pathlib.Path) -> float:
    """Steps per second of two workers of an elastic job."""
    file = directory / "fixed"
    train = [sys.executable, str(HERE / "fixed_order.py"), size, str(file)]
    run = [steadfast.run._program(), "run", "--standalone", "--nproc-per-node", str(TRAINERS), "--"]
    subprocess.run([*run, *train], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return float(file.read_text())


def probe(program: str, data: pathlib.Path, directory: pathlib.Path) -> Dict[str, float]:
    """Runs a program as the only trainer of a job, and returns what it has measured."""
    file = directory / "measured.json"
    os.environ["BENCH_OUT"] = str(file)
    model = dict(script=HERE / program)
    run = steadfast.local(
        job(f"bench-{pathlib.Path(program).stem}", data, 100, model, 1),
        trainers=1,
        pservers=1,
        data_dir=directory / "data",
        progress=False,
    )
    with run:
        summary = run.wait()
    return {**summary["time_breakdown"], **json.loads(file.read_text())}


def compare(name: str, rounds: int, sides: Dict[str, Callable[[pathlib.Path], float]]) -> None:
    """Alternates between two sides, and prints the medians and their ratio."""
    found: Dict[str, List[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, measure in sides.items():
            with tempfile.TemporaryDirectory() as directory:
                found[side].append(measure(pathlib.Path(directory)))
    (ours_name, first), (theirs_name, second) = found.items()
    ratios = sorted(a / b for a, b in zip(first, second))
    print(
        f"{name}: {ours_name} {statistics.median(first):.4g}, {theirs_name} "
        f"{statistics.median(second):.4g}, ratio {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="name of a bench, or its beginning")
    parser.add_argument("--dlrover", action="store_true", help="elastic: measure dlrover-run, too (installs 5 GB)")
    args = parser.parse_args()
    # Watching costs time of the same cores.
    steadfast.run._POLL_RARELY = 2.0
    os.chdir(HERE)
    with tempfile.TemporaryDirectory() as directory:
        data = pathlib.Path(directory) / "data.csv"
        write_records(data)
        for size in HIDDEN:
            if f"ddp-{size}".startswith(args.only):
                compare(
                    f"ddp-{size}, steps per second",
                    args.rounds,
                    {
                        "Steadfast": lambda at, size=size: ours(size, data, at),
                        "DistributedDataParallel": lambda at, size=size: theirs(size, at),
                    },
                )
            if f"order-{size}".startswith(args.only):
                compare(
                    f"order-{size}, steps per second",
                    args.rounds,
                    {
                        "GradientAccumulator": lambda at, size=size: fixed_order(size, at),
                        "DistributedDataParallel": lambda at, size=size: theirs(size, at),
                    },
                )
        if "elastic".startswith(args.only):
            recovery.compare(args.rounds, args.dlrover)
        if "copies".startswith(args.only):
            with tempfile.TemporaryDirectory() as at:
                found = probe("copies.py", data, pathlib.Path(at))
            print(
                f"copies of 64 MiB: parameters {found['parameters']:.2f}, gradient {found['push']:.2f} "
                "(1 is one addition of that size by NumPy)"
            )
        if "share".startswith(args.only):
            with tempfile.TemporaryDirectory() as at:
                found = probe("share.py", data, pathlib.Path(at))
            busy = sum(found[name] for name in ("data", "compute", "push", "pull"))
            print(f"share: {found['torch'] / busy:.2f} of a trainer's time without waiting is PyTorch's")


if __name__ == "__main__":
    sys.exit(main())
