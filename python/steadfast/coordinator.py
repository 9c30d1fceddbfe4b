"""Functions that run on workers which come and go: see :class:`Coordinator`."""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Deque,
    Dict,
    Generic,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    TypeVar,
    Union,
)

from . import _native
from ._closure_worker import is_importing
from ._functions import name_of
from .errors import ClosureCancelled, ClosureError, ClosureErrors, InvalidError, NotFoundError, WorkerLost

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "Coordinator",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValues",
    "RemoteValue",
    "RemoteValueStatus",
    "Worker",
]

T = TypeVar("T")


class RemoteValueStatus(enum.Enum):
    """What has become of a closure."""

    NOT_READY = "not ready"
    """It waits, or runs."""
    READY = "ready"
    """It has a result."""
    ABORTED = "aborted"
    """It failed, or was cancelled."""


class RemoteValue:
    """The result of a closure. As an argument of another closure, it stands for the result.

    When the last reference to it is gone, the result is dropped.
    """

    def __init__(self, handle: _native.RemoteValue) -> None:
        self._handle = handle

    @property
    def number(self) -> int:
        """The number of the closure, counted from 1 at its coordinator."""
        return self._handle.number

    @property
    def status(self) -> RemoteValueStatus:
        """What has become of the closure so far."""
        return RemoteValueStatus(self._handle.state())

    def fetch(self, timeout: Optional[float] = None) -> Any:
        """Waits for the closure, and returns what its function has returned.

        Arrays come as NumPy arrays. If the function had no more data (:class:`StopIteration`), this is ``None``.

        Args:
            timeout: Most seconds to wait; ``None`` waits as long as it takes.

        Raises:
            TimeoutError: The closure is not over yet.
            ClosureError: The function raised an exception, or the closure cannot run.
            ClosureCancelled: It was cancelled, or another closure had failed before it ran.
            UnavailableError: The coordinator is closed, or another one has its place.
        """
        outcome = self._handle.outcome(timeout)
        if outcome is None:
            raise TimeoutError(f"closure #{self.number} is not over after {timeout} seconds")
        kind, value, error, reason = outcome
        if kind == "failed":
            raise _error(error)
        if kind == "cancelled":
            raise ClosureCancelled(f"closure #{self.number}: {reason}")
        return value

    def end_of_data(self, timeout: Optional[float] = None) -> bool:
        """Waits for the closure; returns whether its function ended with :class:`StopIteration`."""
        outcome = self._handle.outcome(timeout)
        if outcome is None:
            raise TimeoutError(f"closure #{self.number} is not over after {timeout} seconds")
        return outcome[0] == "end of data"

    def cancel(self) -> None:
        """Cancels the closure, unless it is over. If it runs, its result is dropped."""
        self._handle.cancel()

    def __repr__(self) -> str:
        return f"<RemoteValue of closure #{self.number}: {self._handle.state()}>"


class PerWorkerValues(Mapping[int, T], Generic[T]):
    """A value of each worker, by the index of the worker. Indexes may have gaps: workers come and go."""

    def __init__(self, values: Mapping[int, T]) -> None:
        self._values = dict(values)

    def __getitem__(self, index: int) -> T:
        return self._values[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"PerWorkerValues({self._values!r})"


class PerWorkerIterator:
    """An iterator on each worker; as an argument of a closure, that of the worker on which it runs.

    It is made when the first closure with it runs on a worker, and again if the process of the worker was replaced.
    """

    def __init__(self, handle: _native.PerWorker) -> None:
        self._handle = handle

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> Any:
        raise TypeError(
            "the iterators are on the workers: pass this as an argument of a closure, and call `next` there"
        )


class PerWorkerDataset:
    """What a function returns on each worker; ``iter`` makes new iterators.

    As an argument of a closure, it stands for the value itself on the worker on which the closure runs.
    """

    def __init__(self, make: Callable[[bool], _native.PerWorker]) -> None:
        self._make = make
        self._handle = make(False)

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._make(True))


@dataclass(frozen=True)
class Worker:
    """A worker, as it was when :attr:`Coordinator.workers` was read."""

    index: int
    """Never given to another worker of the coordinator."""
    address: str
    state: str
    """``"running"``: it takes closures. ``"stopped"``: it was removed, and takes none until it is added again."""
    threads: int
    """How many closures it runs at once; 0 while there is no connection."""
    closures: int
    """How many closures it runs."""
    finished: int
    """How many closures it has finished."""
    reason: str
    """Why there was no connection last."""
    _coordinator: "Coordinator"

    def stop(self, timeout: Optional[float] = None) -> None:
        """Stops the worker, as :meth:`Coordinator.remove_worker`."""
        self._coordinator.remove_worker(self.address, timeout=timeout)

    def restart(self) -> None:
        """Lets the worker take closures again, as :meth:`Coordinator.add_worker`."""
        self._coordinator.add_worker(self.address)

    def __repr__(self) -> str:
        link = f"{self.threads} threads" if self.threads else f"no connection: {self.reason}"
        return f"<Worker {self.index} at {self.address}: {self.state}, {link}>"


class Coordinator:
    """Runs functions on workers that come and go.

    ::

        with steadfast.Coordinator(["localhost:2101", "localhost:2102"]) as coordinator:
            results = [coordinator.schedule(train_step, args=(batch,)) for batch in batches]
            coordinator.join()
            print(sum(result.fetch() for result in results))

    A worker is a process that the platform starts, on the same code: ``python -m steadfast.worker train.py``. A closure
    is a function of one of its modules, with arguments: ``None``, numbers, text, bytes, arrays, and lists, tuples and
    dictionaries of them. Results are the same. Nothing is pickled.

    A closure of a worker that is lost runs again on another one, so its function may run more than once; what it
    returns counts once, and so does what it pushes. A closure that was given a ``name`` runs no more once its result is known: with a ``job``, the
    result is in etcd, and a program that was killed and is started again goes on where it was.

    With ``parameters``, closures train a model on the job's parameter servers: they read it with
    ``steadfast.current_closure().get_parameters()``, and push gradients.

    The ``with`` block waits for all closures at its end; left by an exception, it drops them.

    Args:
        workers: Addresses (``host:port``) of the first workers. More are added with :meth:`add_worker`. Without any, a
            coordinator with a ``job`` finds the workers that are started with ``--job``, and follows which of them run.
        job: Name of the job. With it, results of closures with a name are kept in etcd, and there is one coordinator of
            this job at a time.
        endpoints: Addresses of etcd; by default ``STEADFAST_ETCD_ENDPOINTS``, or that of this machine.
        parameters: Initial values of the parameters that closures train, by name; they become float32. They need a
            ``job`` whose file has ``model.kind = "closures"``. If the job has trained them before, their present values
            stay. Waits until the master and the parameter servers of the job run.
        on_error: ``"stop"``: when a closure fails, those that do not run yet are cancelled, and the next call of
            :meth:`schedule`, :meth:`join` or :meth:`done` raises. ``"continue"``: the others go on, and :meth:`join`
            raises at the end.
        worker_losses_max: A closure fails after so many workers were lost that ran it; 10 by default.
        waiting_max: How many closures may wait for a worker, 262 144 by default. :meth:`schedule` waits for room.
        args: Further settings, such as ``["--tls", "certs/admin"]``; ``STEADFAST_...`` variables have the same.

    Raises:
        InvalidError: A setting is invalid.
        ConflictError: Another coordinator of this job runs; the job has ended, or trains another kind of model.
        UnavailableError: etcd does not answer.
    """

    def __init__(
        self,
        workers: Optional[Iterable[str]] = None,
        *,
        job: Optional[str] = None,
        endpoints: Union[str, Sequence[str], None] = None,
        parameters: Optional[Mapping[str, Any]] = None,
        on_error: str = "stop",
        worker_losses_max: Optional[int] = None,
        waiting_max: Optional[int] = None,
        args: Sequence[str] = (),
    ) -> None:
        if isinstance(workers, str):
            raise InvalidError("`workers` is one text; pass a list of addresses")
        if on_error not in ("stop", "continue"):
            raise InvalidError(f"`on_error` is {on_error!r}; use 'stop' or 'continue'")
        if is_importing():
            raise InvalidError(
                "this worker imports the program, which then begins to coordinate; put what the program does below "
                '`if __name__ == "__main__":`'
            )
        settings = ["--continue-on-error"] if on_error == "continue" else []
        if workers is None and job is not None:
            settings.append("--discover")
        given = {"job": job, "worker-losses-max": worker_losses_max, "waiting-max": waiting_max}
        settings += [f"--{name}={value}" for name, value in given.items() if value is not None]
        if endpoints is not None:
            listed = endpoints if isinstance(endpoints, str) else ",".join(endpoints)
            settings.append(f"--etcd-endpoints={listed}")
        self._on_error = on_error
        declared = None if parameters is None else dict(parameters)
        self._native = _native.Coordinator([*settings, *args], _emit, declared)
        self._indexes: Set[int] = set()
        for address in workers or ():
            self.add_worker(address)

    # Workers

    def add_worker(self, address: str) -> int:
        """Adds the worker at ``host:port``; returns its index.

        A worker that was removed takes closures again, under the index that it had; what it had made for this
        coordinator (see :meth:`create_per_worker_dataset`) is still there. The process need not have begun: the
        coordinator connects as soon as it answers.

        Raises:
            InvalidError: The address is none.
        """
        index = self._native.add_worker(address)
        self._indexes.add(index)
        return index

    def remove_worker(self, address: str, *, timeout: Optional[float] = None) -> None:
        """Lets a worker take no more closures, and waits until it has finished those that it runs.

        The process itself is the platform's, and goes on; so do the other workers. What only this worker may run is
        cancelled.

        Args:
            address: The address with which it was added.
            timeout: Most seconds to wait. Then other workers run what it has not finished; what it replies later does
                not count.

        Raises:
            NotFoundError: No worker with this address was added.
            UnavailableError: The coordinator is closed, or another one has its place.
        """
        index = self._native.remove_worker(address)
        if not self._native.wait_for_rest(index, timeout):
            self._native.take_back(index)
            self._native.wait_for_rest(index, None)

    @property
    def workers(self) -> List[Worker]:
        """All workers that were added, by index, removed ones included."""
        rows = self._native.workers()
        return [
            Worker(index, address, "running" if runs else "stopped", threads, closures, finished, reason, self)
            for index, address, runs, threads, closures, finished, reason in rows
        ]

    # Closures

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Optional[Dict[str, Any]] = None,
        *,
        name: Optional[str] = None,
        worker: Union[int, str, Worker, None] = None,
        timeout: Optional[float] = None,
    ) -> RemoteValue:
        """Lets a worker call ``fn(*args, **kwargs)``. Returns at once, unless too many closures wait.

        Args:
            fn: A function of a module with which the workers were started.
            args: May hold results of other closures (:class:`RemoteValue`), for which the closure waits, and what
                :meth:`create_per_worker_dataset` and ``iter`` of it return.
            kwargs: The same by name.
            name: If the result of a closure with this name is known, it does not run again. Letters, digits and
                ``-_.:=+@``. The result has at most 1 MiB.
            worker: Index, address or :class:`Worker`: the only one that may run it.
            timeout: Most seconds to wait while too many closures wait.

        Raises:
            ClosureErrors: Closures have failed whose errors were not raised yet, with ``on_error="stop"``.
            InvalidError: The function or the name cannot be used.
            TypeError: An argument does not travel.
            TimeoutError: There was no room in time.
            UnavailableError: The coordinator is closed, or another one has its place.
        """
        if self._on_error == "stop":
            self._raise_errors()
        if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
            raise InvalidError(f"`args` is a {type(args).__name__}; pass a tuple of the arguments, such as `(value,)`")
        index = None if worker is None else self._index_of(worker)
        handle = self._native.schedule(name_of(fn), tuple(args), kwargs, name=name, worker=index, timeout=timeout)
        if handle is None:
            raise TimeoutError(f"{self._native.waiting()} closures wait for a worker, and none began in time")
        return RemoteValue(handle)

    def map(
        self, fn: Callable[..., Any], items: Iterable[Any], *, ahead: int = 64, on_each: bool = False
    ) -> Iterator[Any]:
        """Yields ``fn(item)`` for each of the items, in their order.

        Args:
            fn: A function of a module with which the workers were started.
            items: The arguments. They are taken as they are needed, so they may be endless.
            ahead: How many closures are scheduled at once.
            on_each: Whether an item is a tuple of several arguments.

        Raises:
            ClosureError: A closure has failed.
            ClosureErrors: As :meth:`schedule`.
        """
        window: Deque[RemoteValue] = deque()
        for item in items:
            window.append(self.schedule(fn, tuple(item) if on_each else (item,)))
            if max(1, ahead) <= len(window):
                yield window.popleft().fetch()
        while window:
            yield window.popleft().fetch()

    def run_on_each(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> PerWorkerValues[RemoteValue]:
        """Schedules ``fn(*args, **kwargs)`` once on each worker that is not removed; returns the results by index."""
        running = [worker.index for worker in self.workers if worker.state == "running"]
        return PerWorkerValues({index: self.schedule(fn, args, kwargs, worker=index) for index in running})

    def join(self, timeout: Optional[float] = None) -> None:
        """Waits until all closures are over.

        Args:
            timeout: Most seconds to wait.

        Raises:
            ClosureErrors: Closures have failed whose errors were not raised yet: by this, :meth:`schedule`, or a fetch.
            TimeoutError: Some are not over; the message says how many wait and run, and for what.
            UnavailableError: The coordinator is closed, or another one has its place.
        """
        if not self._native.wait_until_done(timeout):
            raise TimeoutError(self._waits())
        self._raise_errors()

    def done(self) -> bool:
        """Returns whether all closures are over.

        Raises:
            ClosureErrors: As :meth:`join`.
        """
        self._raise_errors()
        return self._native.pending() == 0

    def fetch(self, value: Any, timeout: Optional[float] = None) -> Any:
        """Waits for results: replaces each :class:`RemoteValue` in lists, tuples, dictionaries and
        :class:`PerWorkerValues` by what it stands for, as :meth:`RemoteValue.fetch` does."""
        end = None if timeout is None else time.monotonic() + timeout

        def fetched(part: Any) -> Any:
            if isinstance(part, RemoteValue):
                return part.fetch(None if end is None else max(0.0, end - time.monotonic()))
            if isinstance(part, PerWorkerValues):
                return PerWorkerValues({index: fetched(it) for index, it in part.items()})
            if isinstance(part, dict):
                return {key: fetched(it) for key, it in part.items()}
            if isinstance(part, (list, tuple)):
                items = [fetched(it) for it in part]
                return items if isinstance(part, list) else tuple(items)
            return part

        return fetched(value)

    @property
    def pending(self) -> int:
        """How many closures are not over."""
        return self._native.pending()

    # Values of each worker

    def create_per_worker_dataset(
        self,
        dataset_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> PerWorkerDataset:
        """Returns what stands for ``dataset_fn(*args, **kwargs)``, called once on each worker.

        ``iter`` of it makes an iterator on each worker, to be an argument of closures; the function is called once more for
        each. A worker calls the function when a closure needs it, so workers that are added later have it, too. A process
        that replaces a worker begins anew. The values are dropped when the program has dropped what stands for them, and
        no closure needs them. With several threads, one at a time takes the next item. In the function, ``steadfast.current_closure().worker`` is the index of the worker.
        """
        name = name_of(dataset_fn)

        def make(iterates: bool) -> _native.PerWorker:
            return self._native.per_worker(name, tuple(args), kwargs, iterates=iterates)

        return PerWorkerDataset(make)

    # Parameters

    def get_parameters(self) -> Dict[str, "np.ndarray[Any, Any]"]:
        """Reads the parameters that closures train: read-only arrays of float32 by name.

        They reflect the pushes of all closures that are over: if the loss of a parameter server has undone some, this
        waits until these have run again. Of others, each array has what was pushed so far to its parts.

        Raises:
            InvalidError: The coordinator has no parameters.
        """
        return self._native.get_parameters()

    def save_model(self, place: str) -> str:
        """Writes the parameters as a safetensors file to a path or a URL; returns their SHA-256.

        Raises:
            InvalidError: The coordinator has no parameters, or the place cannot be written.
        """
        return self._native.save_model(place)

    def finish_job(self) -> None:
        """Waits for all closures and for a checkpoint that has their pushes, and ends the job: its model is saved, and
        its processes end.

        Raises:
            ClosureErrors: As :meth:`join`.
        """
        self.join()
        self._native.finish_job()

    # Its end

    def forget_results(self) -> None:
        """Forgets the results of all closures with a name: they run again when they are scheduled."""
        self._native.forget_results()

    def close(self) -> None:
        """Ends the coordinator. Closures that are not over have no result; workers go on. May be called again."""
        self._native.close()

    def __enter__(self) -> "Coordinator":
        return self

    def __exit__(self, kind: Optional[type], *_: object) -> None:
        try:
            if kind is None:
                self.join()
        finally:
            self.close()

    def _index_of(self, worker: Union[int, str, Worker]) -> int:
        if isinstance(worker, Worker):
            return worker.index
        if isinstance(worker, int) and worker in self._indexes:
            return worker
        for known in self.workers:
            if worker in (known.index, known.address):
                return known.index
        raise NotFoundError(f"no worker {worker!r} was added")

    def _raise_errors(self) -> None:
        errors, more = self._native.take_errors()
        if errors:
            raise ClosureErrors([_error(error) for error in errors], more)

    def _waits(self) -> str:
        workers = self.workers
        running = sum(worker.closures for worker in workers)
        text = f"{self.pending} closures are not over: {self._native.waiting()} wait, {running} run"
        lost = [f"{it.address} ({it.reason})" for it in workers if it.state == "running" and not it.threads]
        if not any(it.state == "running" for it in workers):
            return f"{text}; there is no worker: add one"
        shown = [*lost[:5], *([f"{len(lost) - 5} more"] if 5 < len(lost) else [])]
        return f"{text}; no connection to {', '.join(shown)}" if lost else text


def _error(error: Any) -> ClosureError:
    number, function, name, (exception, message, traceback, worker) = error
    kind = WorkerLost if exception == "WorkerLost" else ClosureError
    return kind(number, function, name, exception, message, traceback, worker)


def _emit(logger: str, level: int, message: str) -> None:
    logging.getLogger(logger).log(level, "%s", message)
