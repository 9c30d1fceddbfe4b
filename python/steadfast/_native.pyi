"""The extension module: see :mod:`steadfast`."""

from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from .elastic._agent import Assignment, Buffer

__version__: str
"""The version of the package and of its programs."""

class Key:
    """What the random numbers of a gradient depend on: equal on every trainer that computes it."""

    def __init__(self, job_seed: int, pass_number: int, step: int, lane: int) -> None: ...
    @property
    def seed(self) -> int:
        """A seed from all parts of the key, from 0 to 2**63 - 1."""
    @property
    def job_seed(self) -> int:
        """The seed of the job."""
    @property
    def pass_number(self) -> int:
        """The pass over the data, from 0."""
    @property
    def step(self) -> int:
        """The step within the pass, from 0; in asynchronous jobs the number of the mini-batch."""
    @property
    def lane(self) -> int:
        """The lane; 0 in asynchronous jobs."""

class Work:
    """The records of a gradient, and the parameters at which to compute it."""

    @property
    def parameters(self) -> Dict[str, Any]:
        """The parameters by name: read-only float32 arrays, and of tables :class:`steadfast.Rows`."""
    @property
    def batch(self) -> Dict[str, Any]:
        """The records, as the model's ``transform`` returned them: arrays by column."""
    @property
    def key(self) -> Key:
        """What the random numbers of this gradient depend on."""
    @property
    def records(self) -> int:
        """Number of records."""
    def push(self, gradients: Mapping[str, Optional[Any]], *, loss_sum: float, weight: Optional[float] = None) -> bool:
        """Pushes the gradient of the *sum* of the records' losses.

        ``gradients`` has one array per parameter, by name, and of a table one with the shape of its rows' values;
        ``None`` or a missing name counts as zero. ``weight`` is what the records count together, such as the number of
        their tokens; by default the number of records.

        Returns:
            Whether the gradient still counts: not if the job was rolled back meanwhile, or the trainer's lease
            was lost. A gradient that does not count has no effect; its records are computed again.

        Raises:
            ValueError: A name is unknown, or an array has another shape than its parameter.
            TypeError: A value does not convert to float32.
            RuntimeError: The work was answered already.
        """
    def fail(self, reason: str) -> None:
        """Ends the trainer with this reason: the gradient cannot be computed."""

class Trainer:
    def __init__(
        self,
        args: List[str],
        build: Callable[[Mapping[str, Any], int], Any],
        emit: Optional[Callable[[str, int, str], None]] = None,
    ) -> None: ...
    def __iter__(self) -> Iterator[Work]: ...
    def __next__(self) -> Work: ...
    def set_parameters(self, values: Dict[str, Any]) -> None: ...
    def get_parameters(self) -> Dict[str, np.ndarray]: ...
    def save_model(self, place: str) -> str: ...
    def leave(self) -> None: ...
    def close(self) -> None: ...

class Worker:
    """The agent of this node, as :class:`steadfast.elastic.Agent` describes it; found by ``STEADFAST_AGENT``."""

    def assignment(self) -> Assignment: ...
    def changes(self, since: int) -> Tuple[int, int]: ...
    def next_round(self, after: int, timeout: Optional[float]) -> Assignment: ...
    def is_over(self, round: int) -> bool: ...
    def put_commit(self, number: int, parts: Sequence[Buffer]) -> None: ...
    def get_commit(self) -> Optional[Tuple[int, Buffer]]: ...
    def decide_commit(self, phase: int, pass_number: int, used: int, seen: int) -> bool: ...
    def get_commit_record(self) -> bytes: ...
    def decide_dynamic_commit(self, phase: int, place: int, number: int, record: bytes) -> Optional[bytes]: ...
    def fetch_records(
        self, round: int, place: int, wanted: int, least: int, end: int
    ) -> Tuple[int, List[Tuple[int, int]], bool]: ...
    def progress(self) -> None: ...

def commit_number(round: int, phase: int) -> int:
    """Returns the number of a commit, which is larger for later ones; ``phase`` counts those of a round from 0."""

def job_file(json: str) -> str:
    """Returns the job file (TOML) with these keys (JSON). Raises BadJobFile."""

def toml_to_json(text: str) -> str:
    """Returns the contents of a TOML file as JSON. Raises BadJobFile."""

def category_ids(column: str, values: Union[Sequence[Any], np.ndarray]) -> np.ndarray: ...
