"""What every system trains, two perceptrons and their records, and how a run reports its result."""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

WORKERS, PSERVERS = 2, 2
FEATURES = 784
LABELS = 10
"""Classes that occur, also where the model has more."""
SCALE = 1 / 16
"""Features are integers in the file, so that every system reads the same values."""
WARM_UP = 0.2
"""The part of a run that is not measured."""


class Size(NamedTuple):
    name: str
    hidden: List[int]
    classes: int
    batch: int
    """Records of each worker in a step."""
    records: int
    passes: int
    learning_rate: float

    unit, units = "worker step", "worker steps"
    baseline, baseline_name = "ddp", "DDP"

    @property
    def parameters(self) -> int:
        widths = [FEATURES, *self.hidden, self.classes]
        return sum((a + 1) * b for a, b in zip(widths, widths[1:]))

    @property
    def worker_steps(self) -> int:
        """Steps of all workers together."""
        return self.passes * self.records // self.batch

    @property
    def steps(self) -> int:
        """Steps of each worker."""
        return self.worker_steps // WORKERS

    @property
    def warm_up(self) -> int:
        """Steps of each worker that are not measured."""
        return int(WARM_UP * self.steps)

    @property
    def records_per_task(self) -> int:
        """The same number of whole tasks for each worker."""
        return self.records // 10

    @property
    def loss_at_random(self) -> float:
        return math.log(self.classes)

    def describe(self, directory: pathlib.Path) -> str:
        parameters = f"{self.parameters:,}".replace(",", " ")
        return f"{parameters} parameters, {self.batch} records in a step of each worker"


SIZES = {
    it.name: it
    for it in (
        Size("small", [64], 10, 64, 16000, 48, 0.1),
        Size("large", [4096, 4096], 1000, 16, 960, 3, 0.05),
    )
}


def csv(directory: pathlib.Path, size: Size) -> pathlib.Path:
    return directory / f"{size.name}.csv"


def write(directory: pathlib.Path, size: Size) -> None:
    """Writes the records as CSV, for Steadfast, and as arrays, for the others."""
    if csv(directory, size).exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    normal = np.random.default_rng(0).standard_normal((size.records, FEATURES))
    features = np.rint(normal / SCALE).astype(np.int16)
    label = features[:, :LABELS].argmax(axis=1)
    np.savez(directory / f"{size.name}.npz", features=features, label=label)
    header = ",".join([f"x{i}" for i in range(FEATURES)] + ["label"])
    partial = directory / f"{size.name}.partial"
    table = np.column_stack([features, label])
    np.savetxt(partial, table, fmt="%d", delimiter=",", header=header, comments="")
    partial.rename(csv(directory, size))


def read(directory: pathlib.Path, size: Size) -> Tuple[np.ndarray, np.ndarray]:
    """Returns features (float32) and labels (int64)."""
    with np.load(directory / f"{size.name}.npz") as file:
        return file["features"].astype(np.float32) * np.float32(SCALE), file["label"].astype(np.int64)


def batch_starts(size: Size, worker: int) -> Iterator[int]:
    """Returns the first records of a worker's batches, one for each of its steps."""
    for step in range(size.steps):
        yield (WORKERS * step + worker) * size.batch % size.records


def loss(directory: pathlib.Path, size: Size, layers: Sequence[Tuple[np.ndarray, np.ndarray]]) -> float:
    """Returns the mean loss of the first 1 000 records; a layer is its weight (inputs × outputs) and its bias."""
    features, label = read(directory, size)
    value, label = features[:1000], label[:1000]
    for number, (weight, bias) in enumerate(layers):
        if number:
            value = np.maximum(value, 0)
        value = value @ weight + bias
    value = value - value.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(value).sum(axis=1))
    return float((log_sum - value[np.arange(len(label)), label]).mean())


def report(start: float, end: float, units: float, loss: float) -> None:
    """Tells the benchmark what was measured; times are seconds since 1970, units those of the size."""
    file = pathlib.Path(os.environ["TEST_LOGS"], "result.json")
    found = {"start": start, "end": end, "units": units, "loss": loss}
    file.with_suffix(".partial").write_text(json.dumps(found))
    file.with_suffix(".partial").rename(file)


def torch_layers(net) -> List[Tuple[np.ndarray, np.ndarray]]:
    """Returns the layers of a module whose parameters alternate between weights and biases."""
    arrays = [it.detach().numpy() for it in net.parameters()]
    return [(weight.T, bias) for weight, bias in zip(arrays[::2], arrays[1::2])]
