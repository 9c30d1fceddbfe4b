"""The click model with an embedding table: a DeepFM (Guo et al. 2017), and records in the shape of Criteo's logs."""

from __future__ import annotations

import math
import pathlib
import sys
from typing import List, NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "data"))

import criteo_like  # noqa: E402

COUNTS, COLUMNS = len(criteo_like.EMPTY_COUNTS), len(criteo_like.SIZES)
HELD_OUT = 1 / 8
"""The part of the tasks whose records are not trained on."""


class Records(NamedTuple):
    """Records as arrays, with one row of `counts` and `rows` for each."""

    counts: np.ndarray
    """Logarithms of the counts (float32), 0 where the field is empty."""
    rows: np.ndarray
    """For each column, the row of its category in a table of all categories (int64)."""
    label: np.ndarray
    """0 or 1 (float32)."""


class Clicks(NamedTuple):
    """The size of the model and of its training. All attributes are those that the benchmark needs of any size."""

    name: str
    factors: int
    """Of each category and count, besides a weight."""
    hidden: List[int]
    batch: int
    """Records of all workers together in a step."""
    tasks: int
    records_per_task: int
    learning_rate: float
    passes: int = 4
    """Each row of the table exists after the first one, which is the warm-up."""

    unit, units = "thousand records", "thousand records"
    baseline, baseline_name = "clicks-torch", "PyTorch, one thread"

    @property
    def records(self) -> int:
        """With those that are held out."""
        return self.tasks * self.records_per_task

    @property
    def records_of_pass(self) -> int:
        return int(is_trained(self).sum())

    @property
    def loss_at_random(self) -> float:
        return math.log(2)

    def describe(self, directory: pathlib.Path) -> str:
        width = 1 + self.factors
        rows = f"{table_rows(directory, self):,}".replace(",", " ")
        return f"DeepFM with a table of {rows} rows of {width} values, {self.batch} records in a step of all workers"


CLICKS = Clicks("clicks", 8, [64, 32], 4096, 112, 2048, 0.05)


def tsv(directory: pathlib.Path, size: Clicks) -> pathlib.Path:
    return directory / f"{size.name}.tsv"


def write(directory: pathlib.Path, size: Clicks) -> None:
    """Writes the records as TSV, for Steadfast, and as arrays, for the others."""
    if tsv(directory, size).exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{size.name}.partial"
    with open(partial, "w", newline="\n") as file:
        criteo_like.write(size.records, 1, file)
    lines = [line.split("\t") for line in partial.read_text().splitlines()]
    counts = np.array([[float(field or 0) for field in line[1 : 1 + COUNTS]] for line in lines])
    # Numbered from 0, in an order that depends neither on columns nor on how often a category occurs.
    names = [f"{field} {column}" for line in lines for column, field in enumerate(line[1 + COUNTS :])]
    unique, rows = np.unique(names, return_inverse=True)
    np.savez(
        directory / f"{size.name}.npz",
        counts=np.log1p(counts).astype(np.float32),
        rows=rows.reshape(len(lines), COLUMNS),
        label=np.array([float(line[0]) for line in lines], np.float32),
        table_rows=len(unique),
    )
    partial.rename(tsv(directory, size))


def table_rows(directory: pathlib.Path, size: Clicks) -> int:
    """Returns the number of categories that occur."""
    with np.load(directory / f"{size.name}.npz") as file:
        return int(file["table_rows"])


def is_trained(size: Clicks) -> np.ndarray:
    """Returns for each record whether it is trained on; tasks are held out as Steadfast does it."""
    shares = np.floor(np.arange(size.tasks + 1) * HELD_OUT)
    return np.repeat(shares[1:] == shares[:-1], size.records_per_task)


def read(directory: pathlib.Path, size: Clicks, trained: np.ndarray) -> Records:
    """Returns the records that are selected by `trained`."""
    with np.load(directory / f"{size.name}.npz") as file:
        return Records(*(file[name][trained] for name in Records._fields))


def loss(outputs: np.ndarray, label: np.ndarray) -> float:
    """Returns the mean logistic loss of outputs of a model."""
    outputs = outputs.astype(np.float64)
    return float((np.logaddexp(0, outputs) - label * outputs).mean())
