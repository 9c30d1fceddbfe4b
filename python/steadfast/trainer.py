"""The program of a trainer: ``python -m steadfast.trainer``.

It computes with the model that the job file names (``model.entry``), or runs a program with a training loop
of its own (``--script FILE``). Other arguments are those of ``steadfast-trainer``.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import traceback
from typing import Callable, Sequence

from .client import Trainer
from .errors import InvalidError, SteadfastError

__all__ = ["main"]


def main(args: Sequence[str]) -> int:
    """Runs a trainer, and returns the exit code of its process."""
    try:
        if args[:1] == ["--script"]:
            _run_script(args[1], args[2:])
        else:
            _compute(args)
    except SteadfastError as error:
        return _report(str(error), error.exit_code)
    except Exception:
        return _report(traceback.format_exc(), InvalidError.exit_code)
    return 0


def _compute(args: Sequence[str]) -> None:
    with Trainer(args) as trainer:
        _leave_on_signals(trainer.leave)
        for work in trainer:
            try:
                loss_sum, gradients = trainer.model.gradient(
                    work.parameters, work.batch, work.key
                )
                work.push(gradients, loss_sum=float(loss_sum))
            except Exception:
                _fail(work, traceback.format_exc())


def _run_script(path: str, args: Sequence[str]) -> None:
    sys.argv = [path, *args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")


def _report(message: str, code: int) -> int:
    for line in message.rstrip().splitlines():
        print(f"steadfast-trainer: error: {line}", file=sys.stderr)
    return code


def _fail(work, reason: str) -> None:  # type: ignore[no-untyped-def]
    try:
        work.fail(reason.rstrip())
    except RuntimeError:
        # `push` has reported the error already.
        pass


def _leave_on_signals(leave: Callable[[], None]) -> None:
    """The first SIGTERM or SIGINT leaves the job, the second ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        return

    def first(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        leave()

    signal.signal(signal.SIGTERM, first)
    signal.signal(signal.SIGINT, first)


if __name__ == "__main__":
    # `-m` puts the current directory first; the directory of the job file, which PYTHONPATH has, comes before.
    sys.path.append(sys.path.pop(0))
    sys.exit(main(sys.argv[1:]))
