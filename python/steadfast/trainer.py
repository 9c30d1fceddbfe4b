"""The program of a trainer: ``python -m steadfast.trainer``.

It computes with the model that the job file names (``model.entry``), or runs a program with a training loop
of its own (``--script FILE``). ``--device cuda`` overrides ``model.device``. Other arguments are those of
``steadfast-trainer``; a program with a loop of its own takes these settings from variables.

Outside of ``steadfast local``, ``STEADFAST_JOB_FILE`` names the job file or a copy of it: modules are looked up
in its directory first, and the program that it names as ``model.script`` is run.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import sys
import threading
from typing import Callable, Optional, Sequence, Tuple

from . import _native
from ._stacks import print_stacks_when_asked
from .client import Trainer, leave_all
from .errors import InvalidError, SteadfastError, described
from .model import weighted_sum

__all__ = ["main"]


def main(args: Sequence[str]) -> int:
    """Runs a trainer, and returns the exit code of its process."""
    try:
        if args[:1] == ["--script"]:
            _run_script(args[1], args[2:])
            return 0
        script = _beside_job_file(os.environ.get("STEADFAST_JOB_FILE"))
        if script is None:
            _compute(args)
        else:
            _run_script(script, args)
    except SteadfastError as error:
        return _report(str(error), error.exit_code)
    except Exception as error:
        return _report(described(error), InvalidError.exit_code)
    return 0


def _beside_job_file(path: Optional[str]) -> Optional[str]:
    """Lets imports find the modules beside the job file. Returns the path of its ``model.script``, if any."""
    if not path:
        return None
    directory = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, directory)
    try:
        with open(path, encoding="utf-8") as file:
            keys = json.loads(_native.toml_to_json(file.read()))
    except OSError as error:
        raise InvalidError(f"STEADFAST_JOB_FILE: {error}") from None
    except ValueError as error:
        raise InvalidError(f"STEADFAST_JOB_FILE: {path}: {error}") from None
    model = keys.get("model")
    name = model.get("script") if isinstance(model, dict) else None
    if not isinstance(name, str):
        return None
    script = os.path.join(directory, name)
    if not os.path.isfile(script):
        raise InvalidError(f"{path}: `model.script`: {script} does not exist")
    return script


def _compute(args: Sequence[str]) -> None:
    device, args = _take_device(args)
    with Trainer(args, device=device) as trainer:
        _leave_on_signals(trainer.leave)
        for work in trainer:
            try:
                loss_sum, gradients = trainer.model.gradient(work.parameters, work.batch, work.key)
                total, weight = weighted_sum("loss", loss_sum, work.records)
                # Each record counts once, unless the model says what the records count.
                given = weight if isinstance(loss_sum, (tuple, list)) else None
                work.push(gradients, loss_sum=total, weight=given)
            except Exception as error:
                _fail(work, described(error))


def _take_device(args: Sequence[str]) -> Tuple[Optional[str], Sequence[str]]:
    """Separates ``--device`` from the arguments that the native trainer parses."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device")
    found, rest = parser.parse_known_args(args)
    return found.device, rest


def _run_script(path: str, args: Sequence[str]) -> None:
    _leave_on_sigterm()
    sys.argv = [path, *args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")


def _report(message: str, code: int) -> int:
    for line in message.rstrip().splitlines():
        # A line that is indented belongs to the error above it.
        print(line if line[:1].isspace() else f"steadfast-trainer: error: {line}", file=sys.stderr)
    return code


def _fail(work, reason: str) -> None:  # type: ignore[no-untyped-def]
    try:
        work.fail(reason.rstrip())
    except RuntimeError:
        # `push` has reported the error already.
        pass


def _leave_on_sigterm() -> None:
    """The first SIGTERM leaves the job: the loop of the program ends. Without a trainer it ends the program.

    The first process of a container has no default action for it. SIGINT keeps the meaning that Python gives it.
    """

    def first(number: int, _: object) -> None:
        _expect_second(number)
        if not leave_all():
            sys.exit(0)

    _handle(first, signal.SIGTERM)


def _leave_on_signals(leave: Callable[[], None]) -> None:
    """The first SIGTERM or SIGINT leaves the job, the second ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        return

    def first(number: int, _: object) -> None:
        _expect_second(number)
        leave()

    _handle(first, signal.SIGTERM, signal.SIGINT)


def _handle(first: Callable[[int, object], None], *numbers: int) -> None:
    """Handles these signals, SIGQUIT, and SIGHUP unless ``nohup`` ignores it.

    SIGUSR1 and SIGUSR2, with which schedulers warn, end no process that does not handle them: the first one prints
    stacks.
    """
    for number in (*numbers, signal.SIGQUIT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, first)
    print_stacks_when_asked()
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, lambda *_: None)


def _expect_second(number: int) -> None:
    """Lets the next signal of this number end the process at once.

    A closed terminal often sends SIGHUP twice, which means no more than once.
    """
    signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)


if __name__ == "__main__":
    # `-m` puts the current directory first; the directory of the job file, which PYTHONPATH has, comes before.
    sys.path.append(sys.path.pop(0))
    sys.exit(main(sys.argv[1:]))
