"""Jobs from a Python program or a notebook: :func:`local`, :func:`connect`, :class:`Run`."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Union
from weakref import WeakSet

from ._history import Checkpoint, Evaluation, History, PassEnd
from ._tensor_file import arrays, read
from .errors import (
    ConflictError,
    DeniedError,
    InvalidError,
    JobFailed,
    NotFoundError,
    SteadfastError,
    UnavailableError,
)
from .job import Job
from .progress import Progress

__all__ = ["Checkpoint", "Evaluation", "LocalRun", "PassEnd", "Run", "connect", "local"]

_POLL_EVERY = 0.5
"""Seconds between two looks at a job."""

_POLL_RARELY = 2.0
"""The same, for its history alone."""

_ERRORS = {
    2: InvalidError,
    3: NotFoundError,
    4: ConflictError,
    6: UnavailableError,
    8: DeniedError,
}
"""By the exit code of the command-line tool."""

_FINISHED = (0, 10)
"""Exit codes of a finished job, without and with tasks that were given up."""


def local(
    job: Job,
    *,
    trainers: int = 2,
    pservers: Optional[int] = None,
    masters: int = 1,
    data_dir: Union[str, "os.PathLike[str]", None] = None,
    lease_ttl: str = "5s",
    progress: bool = True,
    accept_code_change: bool = False,
    on_pass: Optional[Callable[[PassEnd], Any]] = None,
    on_evaluation: Optional[Callable[[Evaluation], Any]] = None,
    on_checkpoint: Optional[Callable[[Checkpoint], Any]] = None,
) -> "LocalRun":
    """Starts a job on this machine: etcd, masters, parameter servers and trainers.

    Trainers of a model in Python use the interpreter of this program, and look modules up in the directory
    of the job file, or in the current directory. A data directory that has a job is resumed from its latest checkpoint.

    Args:
        trainers: Number of trainers. It does not change the result of a synchronous job.
        pservers: Number of parameter servers, and of slots; by default as many as a resumed job has, or 2.
        masters: Number of masters: one acts, the others are standbys.
        data_dir: Directory for checkpoints, logs and the model; ``steadfast-data/<name>`` by default.
        lease_ttl: A process that hangs for longer is replaced.
        progress: Whether to show the progress, on the terminal or in the notebook.
        accept_code_change: Whether to resume a job although the code of its model has changed. The summary, the
            status and the audit then say so; without it such a job is refused (:class:`DeniedError`).
        on_pass: Called by :meth:`LocalRun.wait` with a :class:`PassEnd` for each pass that has ended.
        on_evaluation: Called by :meth:`LocalRun.wait` with each :class:`Evaluation` that was seen.
        on_checkpoint: Called by :meth:`LocalRun.wait` with each :class:`Checkpoint` that was seen as the latest.

    The callbacks are described at :meth:`LocalRun.wait`. A job that is resumed begins with the pass in which its latest
    checkpoint is: what it had evaluated and saved before is not reported again.

    The job is stopped, and can be resumed, when this program ends, also if it is killed.

    Returns at once: what keeps the job from starting is raised by :meth:`LocalRun.wait`.

    Raises:
        NotFoundError: The program ``steadfast`` is missing.
    """
    shown = Progress.of(job.name) if progress else None
    directory = pathlib.Path(data_dir or pathlib.Path("steadfast-data", job.name)).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    callbacks = _Callbacks(on_pass, on_evaluation, on_checkpoint)
    history = _history_of(job.name, directory) if callbacks else History()
    text = job.to_toml()
    # A job that runs here already keeps its own file.
    file = directory / f"job-{hashlib.sha256(text.encode()).hexdigest()[:16]}.toml"
    file.write_text(text, "utf-8")
    command = [_program(), "local", str(file), "--data-dir", str(directory), "--output", "json"]
    command += ["--trainers", str(trainers), "--masters", str(masters)]
    if pservers is not None:
        command += ["--pservers", str(pservers)]
    if accept_code_change:
        command.append("--accept-code-change")
    command += ["--lease-ttl", lease_ttl, "--python", sys.executable, "--stop-with-stdin"]
    path = os.pathsep.join(filter(None, [str(job.directory), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        # Closed when this program ends, however it does.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**_environment(), "PYTHONPATH": path},
        # A Ctrl-C of the terminal reaches this program alone, which decides what it means.
        start_new_session=True,
    )
    return LocalRun(job.name, directory, process, shown, history, callbacks)


def connect(
    endpoints: Union[str, Sequence[str]],
    job: str,
    *,
    args: Sequence[str] = (),
    on_pass: Optional[Callable[[PassEnd], Any]] = None,
    on_evaluation: Optional[Callable[[Evaluation], Any]] = None,
    on_checkpoint: Optional[Callable[[Checkpoint], Any]] = None,
) -> "Run":
    """Returns a job that runs elsewhere.

    Args:
        endpoints: URLs of etcd's members.
        job: Name of the job.
        args: Further arguments of ``steadfast status``, such as ``["--tls", "certs/admin"]``.
        on_pass: Called by :meth:`Run.wait` with a :class:`PassEnd` for each pass that ends from here on.
        on_evaluation: Called by :meth:`Run.wait` with each further :class:`Evaluation` that was seen.
        on_checkpoint: Called by :meth:`Run.wait` with each further :class:`Checkpoint` that was seen as the latest.

    Raises:
        NotFoundError: etcd has no job of that name.
        UnavailableError: etcd does not answer.
    """
    urls = endpoints if isinstance(endpoints, str) else ",".join(endpoints)
    callbacks = _Callbacks(on_pass, on_evaluation, on_checkpoint)
    run = Run(job, ["--etcd-endpoints", urls, "--job", job, *args], callbacks=callbacks)
    run.status()
    if callbacks:
        run._history.follow()
    return run


class Run:
    """A job. See :func:`local` and :func:`connect`."""

    def __init__(
        self,
        name: str,
        where: Sequence[str],
        environment: Optional[Mapping[str, str]] = None,
        *,
        history: Optional[History] = None,
        callbacks: Optional[_Callbacks] = None,
    ) -> None:
        self.name = name
        """The name of the job."""
        self._where = list(where)
        self._environment = environment
        self._history = history or History()
        self._callbacks = callbacks or _Callbacks()

    def status(self) -> Dict[str, Any]:
        """Returns the state of the job, as ``steadfast status --output json`` prints it.

        While no master answers, ``master`` is ``None``, and only what etcd has is known.

        Raises:
            SteadfastError: The job or its etcd was not found, see the subclasses.
        """
        status: Dict[str, Any] = json.loads(self._call("status", "--output", "json"))
        self._history.add(status)
        return status

    def curves(self) -> Dict[str, List[Optional[float]]]:
        """Returns the history of the job, as far as it was seen, as columns of one length.

        ``pandas.DataFrame`` takes them: ``seconds`` since the first point, ``step``, ``examples``, ``loss`` and
        ``metric`` (``None`` where there was none yet), and each further metric under its name. Steps increase: when the
        job goes back to a checkpoint, the points of later steps are dropped, as in TensorBoard.
        """
        self._look()
        points = self._history.points()
        first = points[0]["unix_ms"] if points else 0
        further = {name for point in points for name in point.get("further_metrics", {})}
        columns = {
            "seconds": [(point["unix_ms"] - first) / 1000 for point in points],
            "step": [point["version"] for point in points],
            "examples": [point["examples"] for point in points],
            "loss": [point["loss"] for point in points],
            "metric": [point["metric"] for point in points],
        }
        for name in sorted(further - set(columns)):
            columns[name] = [point.get("further_metrics", {}).get(name) for point in points]
        return columns

    def plot(self) -> Any:
        """Draws loss and metrics over the steps; returns the matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        import matplotlib.pyplot as plt

        curves = self.curves()
        drawn = [name for name in curves if name not in ("seconds", "step", "examples")]
        figure, axes = plt.subplots(1, len(drawn), figsize=(5 * len(drawn), 3.5))
        for axis, name in zip(axes, drawn):
            pairs = [(x, y) for x, y in zip(curves["step"], curves[name]) if y is not None]
            axis.plot([x for x, _ in pairs], [y for _, y in pairs])
            axis.set_xlabel("step")
            axis.set_title(name)
        return figure

    def evaluations(self) -> List[Evaluation]:
        """Returns the evaluations of the job, as far as they were seen, by increasing steps.

        There is a look twice a second with callbacks, with the progress shown, or in the ``wait`` of a job elsewhere,
        and one at each call of this. A status has only the latest evaluation, so of several between two looks only the
        last one is here. When the job goes back to a checkpoint, evaluations that it has forgotten are dropped.
        """
        self._look()
        return self._history.evaluations()

    def best(self) -> Optional[Evaluation]:
        """Returns the best evaluation so far; ``None`` if there is none.

        With ``evaluation.patience`` or ``evaluation.keep = "best"`` it is the one that the job has chosen, of all of
        them, by ``evaluation.monitor``; with ``keep = "best"`` its parameters are the result. Else it is the one with
        the lowest loss of those that were seen.
        """
        self._look()
        return self._history.best()

    def _look(self) -> None:
        try:
            self.status()
        except SteadfastError:
            # What was seen before is still true.
            pass

    def _saved_passes(self) -> int:
        """Returns the number of passes that were finished at the latest checkpoint."""
        checkpoints = json.loads(self._call("checkpoint", "list", "--output", "json"))
        return max((it.get("pass", 0) for it in checkpoints if it["latest"]), default=0)

    def model(self, framework: Optional[str] = None, *, average: bool = False) -> Dict[str, Any]:
        """Returns the parameters of the latest checkpoint, or of the finished job, by name; and what a module has
        beside them, so that ``net.load_state_dict(run.model())`` finds all names.

        :func:`steadfast.torch.load` copies them into a module of PyTorch.

        Args:
            framework: ``"numpy"`` or ``"torch"``; by default PyTorch's tensors if the program has imported
                PyTorch, else arrays.
            average: Whether to return the averages of the parameters, which a job with ``average`` has.

        Raises:
            SteadfastError: There is no checkpoint, or it cannot be read; or the job has no averages.
        """
        framework = framework or ("torch" if "torch" in sys.modules else "numpy")
        if framework not in ("numpy", "torch"):
            raise InvalidError(f'`framework` is "{framework}"; use "numpy" or "torch"')
        with tempfile.TemporaryDirectory() as directory:
            file = os.path.join(directory, "model.safetensors")
            self._call("checkpoint", "export", "--to", file, *(["--average"] if average else []))
            found, _ = read(file)
        if framework == "numpy":
            return arrays(found)
        from ._state import tensors

        return dict(tensors(found))

    def export(
        self,
        to: Union[str, "os.PathLike[str]"],
        *,
        optimizer: Union[str, "os.PathLike[str]", None] = None,
        checkpoint: Optional[str] = None,
        force: bool = False,
    ) -> str:
        """Writes a checkpoint as a model file (safetensors); returns the SHA-256 of the parameters.

        Args:
            to: The file to write, a path or a URL.
            optimizer: A file for the state of the optimizer at the same step, which
                :func:`steadfast.torch.optimizer_state` reads.
            checkpoint: The id of a checkpoint or ``"latest"``; by default the latest, or the best parameters of a job
                that has ended and keeps them.
            force: Whether to replace files that exist.

        Raises:
            SteadfastError: There is no such checkpoint, it cannot be read, or a file exists.
        """
        command = ["checkpoint", "export", *([checkpoint] if checkpoint else []), "--to", os.fspath(to)]
        if optimizer is not None:
            command += ["--optimizer", os.fspath(optimizer)]
        return self._call(*command, *(["--force"] if force else [])).strip()

    def wait(self, timeout: Optional[float] = None) -> Dict[str, Any]:
        """Waits for the end of the job and returns its summary.

        Meanwhile it looks at the job twice a second, and calls the callbacks in this thread, in the order of what has
        happened:

        - ``on_pass`` for each finished pass once, also if several ended between two looks. A pass that is done again,
          since the job has gone back to a checkpoint, is not reported again.
        - ``on_evaluation`` for each evaluation that was seen (:meth:`evaluations`), after its pass. One that is done
          again is reported again only if its numbers differ.
        - ``on_checkpoint`` for each checkpoint once, when it was seen as the latest. Of several between two looks it is
          the last one.

        A look that fails, since etcd or no master answers, is made up for by the next one, and what happens between two
        calls of this function is reported by the second. An exception of a callback passes through, and its event
        counts as reported; the job runs on.

        Raises:
            JobFailed: The job has failed.
            TimeoutError: It has not ended after ``timeout`` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                result = self.status().get("result")
            except UnavailableError:
                result = None
            self._callbacks.deliver(self._history)
            if result is not None:
                if result["state"] != "finished":
                    raise JobFailed(result.get("reason") or "no reason was given", result)
                return dict(result)
            if end is not None and end <= time.monotonic():
                raise TimeoutError(f"job {self.name} has not ended after {timeout} s")
            time.sleep(_POLL_EVERY)

    def extend(self, *, passes: Optional[int] = None, steps: Optional[int] = None) -> int:
        """Lets the job train further; returns its new length.

        A job that runs takes a checkpoint and goes on from it. One that has ended, or was stopped, goes on from its
        last checkpoint when its processes are started again, with the same job:
        ``steadfast.local(job, data_dir=run.data_dir)``. Its parameters are then those of a job that had this length
        from the beginning.

        Args:
            passes: Passes to add to those of the job.
            steps: Steps to add, if the job counts steps. Exactly one of both is required.

        Raises:
            InvalidError: The job cannot be extended; the message says why.
            SteadfastError: The job has no checkpoint, or its processes are just starting or stopping.
        """
        if (passes is None) == (steps is None):
            raise InvalidError("exactly one of `passes` and `steps` is required")
        more = ("--passes", str(passes)) if steps is None else ("--steps", str(steps))
        return int(self._call("extend", *more))

    def change(self, job: Job) -> int:
        """Gives the job the settings of ``job``; returns from which step on they hold.

        A job that runs takes a checkpoint and goes on from it with them. One that has ended, or was stopped, goes on
        from its last checkpoint when its processes are started again:
        ``steadfast.local(job, data_dir=run.data_dir)``. The learning rate, the bounds of the gradient, evaluations and
        checkpoints may be others; steps before keep the settings that they were trained with.

        Raises:
            InvalidError: The job cannot be changed, or ``job`` is another one; the message says why.
            SteadfastError: The job has no checkpoint, or its processes are just starting or stopping.
        """
        with tempfile.TemporaryDirectory() as directory:
            file = pathlib.Path(directory, "job.toml")
            file.write_text(job.to_toml(), "utf-8")
            return int(self._call("change", str(file)))

    def _call(self, *args: str) -> str:
        command = [_program(), *args, *self._where]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=self._environment)
        if done.returncode != 0:
            message = _errors_of(done.stderr.decode("utf-8", "replace"))
            raise _ERRORS.get(done.returncode, SteadfastError)(message)
        return done.stdout.decode("utf-8")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of job {self.name}>"


class LocalRun(Run):
    """A job whose processes run on this machine. As a context manager it stops them at the end."""

    def __init__(
        self,
        name: str,
        directory: pathlib.Path,
        process: "subprocess.Popen[bytes]",
        progress: Optional[Progress],
        history: Optional[History] = None,
        callbacks: Optional[_Callbacks] = None,
    ) -> None:
        where = _where(name, directory)
        super().__init__(name, where, _environment(), history=history, callbacks=callbacks)
        self.data_dir = directory
        """Checkpoints, logs and the model."""
        self._process = process
        # By the clock of files, which is coarse.
        self._started = time.time() - 1.0
        self._progress = progress
        self._output: Dict[str, str] = {}
        # Whether this program has stopped the job.
        self._is_stopped = False
        # Notified after each look; whether that was the last one.
        self._looked = threading.Condition()
        self._has_ended = False
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in ("stdout", "stderr")
        ]
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        for thread in [*self._readers, self._watcher]:
            thread.start()
        _RUNNING.add(self)

    @property
    def is_running(self) -> bool:
        """Whether the processes of the job are running."""
        return self._process.poll() is None

    @property
    def endpoint(self) -> str:
        """The URL of the job's etcd, for :func:`connect` and :class:`steadfast.Coordinator`. Waits until it runs.

        Raises:
            UnavailableError: The job ended before; :meth:`wait` raises why.
        """
        file = self.data_dir / "etcd-endpoint"
        # That of an earlier run may be there.
        while not file.exists() or file.stat().st_mtime < self._started:
            if not self.is_running:
                raise UnavailableError(f"job {self.name} has ended")
            time.sleep(0.01)
        return file.read_text().strip()

    def wait(self, timeout: Optional[float] = None) -> Dict[str, Any]:
        """Waits for the end of the job and returns its summary; after :meth:`stop`, that of what was done.

        Calls the callbacks as :meth:`Run.wait` says: in this thread, so in a notebook their output is that of the
        cell. An exception of a callback stops the job as Ctrl-C does, and passes through.

        Ctrl-C stops the job as in a shell: it takes a last checkpoint, ends the processes, and the same
        call of :func:`local` resumes from there. A second Ctrl-C ends them at once.

        Raises:
            JobFailed: The job has failed.
            SteadfastError: A process could not start, see the subclasses. Or another program has stopped the job.
            TimeoutError: The job has not ended after ``timeout`` seconds.
            KeyboardInterrupt: After the processes have ended.
        """
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._follow(end):
                if end is not None and end <= time.monotonic():
                    raise _Late
            self._process.wait()
        except _Late:
            raise TimeoutError(f"job {self.name} has not ended after {timeout} s") from None
        except BaseException:
            self.stop()
            raise
        for thread in [*self._readers, self._watcher]:
            thread.join()
        return self._summary()

    def _follow(self, end: Optional[float]) -> bool:
        """Waits for events until a time, and calls the callbacks. Returns whether the job has ended."""
        left = None if end is None else max(0.0, end - time.monotonic())
        with self._looked:
            self._looked.wait_for(lambda: self._has_ended or self._history.has_events(), left)
            has_ended = self._has_ended
        self._callbacks.deliver(self._history)
        return has_ended

    def stop(self) -> None:
        """Takes a last checkpoint and ends all processes. The job can be resumed; :meth:`wait` returns its summary."""
        if self.is_running:
            self._is_stopped = True
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait()
            except KeyboardInterrupt:
                self._process.send_signal(signal.SIGINT)
                self._process.wait()
                raise

    def kill(self, role: str, number: int = 0) -> int:
        """Kills a process (SIGKILL), to see the job survive: it is restarted.

        Args:
            role: ``"master"``, ``"pserver"`` or ``"trainer"``.
            number: Counted from 0.

        Returns:
            The id of the process that was killed.

        Raises:
            NotFoundError: There is no such process at the moment.
        """
        log = self.data_dir / "logs" / f"{role}-{number}.log"
        for process in _children(self._process.pid):
            try:
                if os.path.samefile(f"/proc/{process}/fd/1", log):
                    os.kill(process, signal.SIGKILL)
                    return process
            except OSError:
                # It has ended meanwhile.
                continue
        raise NotFoundError(f"job {self.name} has no process {role}-{number} at the moment")

    def __enter__(self) -> "LocalRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _summary(self) -> Dict[str, Any]:
        code = self._process.returncode
        summary = self._printed()
        if code in _FINISHED:
            # The master's own history ends with it.
            last = {"unix_ms": int(time.time() * 1000), "version": summary["steps"]}
            figures = {name: summary[name] for name in ("examples", "loss", "metric")}
            further = {name: it for name, it in summary.get("further_metrics", {}).items() if it is not None}
            self._history.add_last({**last, **figures, **({"further_metrics": further} if further else {})})
            return summary
        reason = summary.get("reason") or _errors_of(self._output["stderr"])
        if summary.get("state") == "failed":
            raise JobFailed(reason, summary)
        if summary.get("state") == "drained" and self._is_stopped:
            return summary
        if summary.get("state") == "drained" or code == 130:
            raise SteadfastError(f"job {self.name} was stopped; the same call resumes it")
        if code < 0:
            reason = f"`steadfast local` was ended by {signal.Signals(-code).name}"
        raise _ERRORS.get(code, SteadfastError)(f"{reason} (logs: {self.data_dir / 'logs'})")

    def _printed(self) -> Dict[str, Any]:
        """Returns the summary that the program has printed; it is empty if there is none."""
        output = self._output["stdout"].strip()
        summary: Dict[str, Any] = json.loads(output) if output else {}
        return summary

    def _read(self, name: str) -> None:
        stream = getattr(self._process, name)
        self._output[name] = stream.read().decode("utf-8", "replace")

    def _watch(self) -> None:
        try:
            self._look_until_the_end()
        finally:
            with self._looked:
                self._has_ended = True
                self._looked.notify_all()

    def _look_until_the_end(self) -> None:
        every = _POLL_RARELY if self._progress is None and not self._callbacks else _POLL_EVERY
        while self.is_running:
            try:
                status = self.status()
            except SteadfastError:
                # etcd or the master starts, or has just ended.
                status = None
            if status is not None and status["master"] and self._progress is not None:
                self._progress.show(status)
            with self._looked:
                self._looked.notify_all()
            try:
                self._process.wait(every)
            except subprocess.TimeoutExpired:
                pass
        if self._callbacks:
            self._look_at_the_end()
        if self._progress is not None:
            self._progress.end(self._process.returncode in _FINISHED)

    def _look_at_the_end(self) -> None:
        """Looks for what happened after the last look: the summary and etcd have it."""
        for thread in self._readers:
            thread.join()
        summary = self._printed()
        if summary.get("state") == "drained":
            self._history.add_passes(summary["passes"], summary["steps"], summary["examples"])
            try:
                # The summary may be older than the checkpoint, from which the next run goes on.
                self._history.add_passes(self._saved_passes(), summary["steps"], summary["examples"])
            except SteadfastError:
                # There is none.
                pass
        self._look()
        if summary.get("state") == "finished":
            self._history.add_passes(summary["passes"], summary["steps"], summary["examples"])


class _Late(Exception):
    """The time of a wait has passed."""


class _Callbacks:
    """What a program wants to be called with, by the type of the event."""

    def __init__(
        self,
        on_pass: Optional[Callable[[PassEnd], Any]] = None,
        on_evaluation: Optional[Callable[[Evaluation], Any]] = None,
        on_checkpoint: Optional[Callable[[Checkpoint], Any]] = None,
    ) -> None:
        given: Dict[type, Optional[Callable[[Any], Any]]] = {
            PassEnd: on_pass,
            Evaluation: on_evaluation,
            Checkpoint: on_checkpoint,
        }
        self._functions = {kind: it for kind, it in given.items() if it is not None}

    def __bool__(self) -> bool:
        return bool(self._functions)

    def deliver(self, history: History) -> None:
        """Calls them with what has happened. An event whose callback raises an exception counts as delivered."""
        while True:
            event = history.next_event()
            if event is None:
                return
            function = self._functions.get(type(event))
            if function is not None:
                function(event)


def _history_of(name: str, directory: pathlib.Path) -> History:
    """Returns the history of a job that is about to start in a directory, with what lies before its start."""
    history = History()
    before = Run(name, _where(name, directory), _environment(), history=history)
    passes = 0
    try:
        result = before.status().get("result")
        passes = before._saved_passes() if result is None else result["passes"]
    except SteadfastError:
        # It is a new one.
        pass
    history.follow(passes)
    return history


def _where(name: str, directory: pathlib.Path) -> List[str]:
    return ["--data-dir", str(directory), "--job", name]


_RUNNING: "WeakSet[LocalRun]" = WeakSet()


@atexit.register
def _stop_all() -> None:
    for run in list(_RUNNING):
        run.stop()


def _leave_all() -> None:
    """In a forked process: the runs belong to its parent, and end with it."""
    for run in list(_RUNNING):
        if run._process.stdin is not None:
            run._process.stdin.close()
    _RUNNING.clear()


os.register_at_fork(after_in_child=_leave_all)


def _program() -> str:
    """Finds the command-line tool: beside the interpreter, where pip has put it, or on the PATH."""
    found = shutil.which("steadfast", path=sysconfig.get_path("scripts")) or shutil.which("steadfast")
    if found is None:
        raise NotFoundError("the program `steadfast` is neither beside this interpreter nor on the PATH")
    return found


def _environment() -> Dict[str, str]:
    """Returns the environment without settings of another job or etcd."""
    kept = ("STEADFAST_LOG", "STEADFAST_LOG_FORMAT", "STEADFAST_OTLP_ENDPOINT", "STEADFAST_DRAIN_TIMEOUT")
    own = os.environ.items()
    return {name: it for name, it in own if name in kept or not name.startswith("STEADFAST_")}


def _errors_of(stderr: str) -> str:
    """The messages that a command has written, without its name and progress."""
    lines = stderr.replace("\r", "\n").splitlines()
    errors: List[str] = []
    is_within = False
    for line in lines:
        is_continued = is_within and line[:1].isspace()
        is_within = is_continued or "error: " in line
        if is_within:
            errors.append(line if is_continued else line.split("error: ", 1)[1])
    return "\n".join(errors or lines[-1:])


def _children(parent: int) -> List[int]:
    found = []
    for task in pathlib.Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            # The thread has ended meanwhile.
            continue
    return found
