"""The description of a job, as keyword arguments."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import re
from typing import Any, Dict, Mapping, Optional, Sequence, Union

from . import _native
from .errors import BadJobFile

__all__ = ["Job", "Rule"]

Section = Mapping[str, Any]

_WITH_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*://")


class Rule(Dict[str, Any]):
    """An update rule as text, which parameter servers apply: the argument ``optimizer`` of :class:`Job`.

    ::

        optimizer = steadfast.Rule("m = b1*m + (1 - b1)*g; p -= lr*sign(m)", states=["m"], constants={"b1": 0.9})

    The names and functions of a rule are listed in docs/job-file.md.

    Args:
        text: Assignments, which line ends or semicolons separate. ``p`` is the parameter and ``g`` its gradient.
        states: Names of the vectors that are kept from step to step.
        constants: Numbers by name.
        settings: Further keys of the section ``[optimizer]``, such as ``weight_decay`` or ``groups``.
    """

    def __init__(
        self,
        text: str,
        *,
        states: Sequence[str] = (),
        constants: Optional[Mapping[str, float]] = None,
        **settings: Any,
    ) -> None:
        super().__init__(kind="rule", rule=text, states=list(states), constants=dict(constants or {}), **settings)


class Job:
    """What to train, on what data, and how: a job file as keyword arguments.

    Each argument is a key or a section of the job file (docs/job-file.md), with the same defaults. The
    section ``[async]`` is called ``async_``. Durations may be :class:`datetime.timedelta`, paths
    :class:`pathlib.Path`. Relative paths start at the current directory.

    ::

        job = steadfast.Job(
            name="digits",
            passes=20,
            dataset=dict(source=["digits.parquet"], format="parquet", features=["pixel_*"], label="digit"),
            model=dict(kind="python", entry="digits:build"),
            optimizer=dict(kind="adam"),
            learning_rate=dict(base=0.002),
        )

    Args:
        name: Names the job: 1 to 100 letters, digits, ``-``, ``_``, ``.``.
        dataset: ``source`` and ``format`` are required, and either ``features`` and ``label`` or ``columns``.
        model: ``kind`` is required; for a model in Python ``kind="python"`` with ``entry`` or ``script``.
        mode: ``"sync"`` or ``"async"``.
        passes: Passes over the training data. Exactly one of ``passes`` and ``steps`` is required.
        steps: Steps; synchronous jobs only.
        seed: Seed of every random choice.
        warm_spares: Parameter servers beyond one for each slot, each of which follows a slot: its loss then takes no
            step back.
        start: A safetensors file that the parameters start from: its path or URL, or the section with ``file``,
            ``names``, ``new`` and ``optimizer``.
        optimizer: The section, or a :class:`Rule`.
        average: A moving average of the parameters: ``decay``, ``start_step``, ``every_steps``.
        tables: Settings of embedding tables, by the name of the table.

    Raises:
        BadJobFile: One line for each error, with the name of the argument.
    """

    def __init__(
        self,
        *,
        name: str,
        dataset: Section,
        model: Section,
        mode: str = "sync",
        passes: Optional[int] = None,
        steps: Optional[int] = None,
        seed: int = 0,
        warm_spares: int = 0,
        start: Union[str, "os.PathLike[str]", Section, None] = None,
        optimizer: Optional[Section] = None,
        learning_rate: Optional[Section] = None,
        average: Optional[Section] = None,
        sync: Optional[Section] = None,
        async_: Optional[Section] = None,
        gradients: Optional[Section] = None,
        tables: Optional[Mapping[str, Section]] = None,
        tasks: Optional[Section] = None,
        evaluation: Optional[Section] = None,
        checkpoint: Optional[Section] = None,
    ) -> None:
        given = {
            "name": name,
            "mode": mode,
            "passes": passes,
            "steps": steps,
            "seed": seed,
            "warm_spares": warm_spares,
            "dataset": {**dataset, "source": _sources(dataset.get("source"))},
            "model": _with_absolute(model, "script"),
            "start": _start(start),
            "optimizer": optimizer,
            "learning_rate": learning_rate,
            "average": average,
            "sync": sync,
            "async": async_,
            "gradients": gradients,
            "tables": tables,
            "tasks": tasks,
            "evaluation": _with_sources(evaluation),
            "checkpoint": checkpoint,
        }
        self._set(name, given, pathlib.Path.cwd())

    def _set(self, name: str, keys: Mapping[str, Any], directory: pathlib.Path) -> None:
        self._text: str = _native.job_file(_json(keys))
        self.name = name
        """The name of the job."""
        self.directory = directory
        """Where trainers look up the module of the model first."""

    @classmethod
    def from_file(cls, path: Union[str, "os.PathLike[str]"]) -> "Job":
        """Reads a job file.

        Raises:
            BadJobFile: The file is invalid.
            OSError: The file cannot be read.
        """
        file = pathlib.Path(os.path.abspath(path))
        keys: Dict[str, Any] = json.loads(_native.toml_to_json(file.read_text("utf-8")))
        source = keys.get("dataset", {}).get("source")
        if isinstance(source, list):
            keys["dataset"]["source"] = [_absolute(it, file.parent) for it in source]
        evaluated = keys.get("evaluation", {}).get("source")
        if isinstance(evaluated, list):
            keys["evaluation"]["source"] = [_absolute(it, file.parent) for it in evaluated]
        if "model" in keys:
            keys["model"] = _with_absolute(keys["model"], "script", file.parent)
        if isinstance(keys.get("start"), dict):
            for key in ("file", "optimizer"):
                keys["start"] = _with_absolute(keys["start"], key, file.parent)
        job = cls.__new__(cls)
        job._set(keys.get("name", ""), keys, file.parent)
        return job

    def to_toml(self) -> str:
        """Returns the job file."""
        return self._text

    def __repr__(self) -> str:
        return f"<Job {self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


def _json(keys: Mapping[str, Any]) -> str:
    plain = _plain(keys, "")
    try:
        return json.dumps(plain, allow_nan=False)
    except ValueError:
        raise BadJobFile(["a number is not finite"]) from None


def _with_absolute(section: Section, key: str, directory: Optional[pathlib.Path] = None) -> Dict[str, Any]:
    absolute = _absolute(section.get(key), directory or pathlib.Path.cwd())
    return {**section, key: absolute} if key in section else dict(section)


def _start(given: Union[str, "os.PathLike[str]", Section, None]) -> Optional[Dict[str, Any]]:
    if given is None:
        return None
    section = given if isinstance(given, Mapping) else {"file": given}
    return _with_absolute(_with_absolute(section, "file"), "optimizer")


def _with_sources(section: Optional[Section]) -> Optional[Dict[str, Any]]:
    if section is None:
        return None
    return {**section, "source": _sources(section["source"])} if "source" in section else dict(section)


def _sources(given: Any) -> Any:
    if isinstance(given, (str, os.PathLike)):
        given = [given]
    if not isinstance(given, Sequence):
        return given
    here = pathlib.Path.cwd()
    return [_absolute(it, here) for it in given]


def _absolute(source: Any, directory: pathlib.Path) -> Any:
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if not isinstance(source, str) or _WITH_SCHEME.match(source):
        return source
    return os.path.normpath(directory / source)


def _plain(value: Any, path: str) -> Any:
    """Converts to what JSON can express; leaves out ``None``."""
    if isinstance(value, Mapping):
        items = ((key, _plain(it, f"{path}.{key}".lstrip("."))) for key, it in value.items())
        return {str(key): it for key, it in items if it is not None}
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, datetime.timedelta):
        return f"{round(value.total_seconds() * 1000)}ms"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        # NumPy arrays and scalars, pandas indexes.
        value = value.tolist()
        if value is None or isinstance(value, (str, bool, int, float)):
            return value
    if isinstance(value, (list, tuple)):
        return [_plain(it, f"{path}[{index}]") for index, it in enumerate(value)]
    raise BadJobFile([f"`{path}` has the type {type(value).__name__}, which a job file cannot express"])
