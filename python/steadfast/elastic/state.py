"""What a program keeps when its workers change."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Optional, Tuple, Union

from ..errors import InvalidError
from . import _file
from ._agent import Assignment, Buffer
from ._alike import check_alike
from ._divided import Divided
from ._failures import of_program
from ._membership import Membership, membership
from ._registered import Registered
from ._snapshot import decode, encode
from ._variables import Variables, variables_of

__all__ = ["ObjectState", "State"]

_LOG = logging.getLogger("steadfast.elastic")


class State:
    """What all workers agree on. Subclasses define :meth:`save`, :meth:`restore` and :meth:`sync`."""

    def __init__(self) -> None:
        self._reset_callbacks: Registered[Callable[[], None]] = Registered()

    def commit(self) -> None:
        """Saves the state, then checks whether members have changed. All ranks call it at the same step.

        After a failure the state goes back to the last commit. A commit copies the state: choose how often by
        how much work may be repeated. In a job that counts records it also waits until all workers have their copy.

        Raises:
            HostsUpdatedInterrupt: Members were added or removed.
            InvalidError: The workers of a job that counts records have seen different ones.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Checks whether members have changed, without a commit. All ranks call it at the same step.

        It costs one small exchange with the other workers, and is meant for each batch.

        Raises:
            HostsUpdatedInterrupt: Members were added or removed; raised on all ranks.
        """
        membership().check_updates()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Adds functions to call when the workers have been regrouped, before the state is synchronized.

        They are for what depends on the number of workers, such as the learning rate. They are called in the
        order in which they were added, on the workers that were in the round before: new ones begin with their first.
        An exception of a function passes through, unless it is by its type that of a failed operation of all workers.

        A function is called once, however often it was added. One that the training function adds is there until the
        training function begins again, after it was called, or ends.
        """
        for callback in callbacks:
            self._reset_callbacks.add(callback)

    def on_reset(self) -> None:
        """Calls :meth:`reset`, then the callbacks. :func:`run` calls it in each new round."""
        self.reset()
        for callback in self._reset_callbacks.all():
            with of_program():
                callback()

    def on_round(self) -> None:
        """Begins a round: all workers call it, new ones too, once their group is formed.

        It may use the group. Does nothing, unless a subclass defines it.
        """

    def reset(self) -> None:
        """Adapts the state to a new round. Does nothing, unless a subclass defines it."""

    def save(self) -> None:
        """Copies the state, for :meth:`restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the state that was last saved or synchronized, or else to the initial one."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all ranks the same state, and saves it."""
        raise NotImplementedError


class ObjectState(State):
    """Keeps attributes.

    ::

        state = steadfast.elastic.ObjectState(weights=np.zeros(10), epoch=0)
        state.epoch += 1

    An attribute is a number, string, array or tensor, bytes, a list, tuple, set or dict of them, a member of an
    enumeration, an object that consists of such attributes, or one with ``state_dict`` and ``load_state_dict``, or a variable
    of TensorFlow or a list of some, which keep their identity. Those that are not declared here are not kept.

    A commit is kept by the agent of the node as well: a worker that is killed and started again continues
    from there. Of the workers of a round the one with the newest commit, or else the oldest, passes its state
    on.

    Args:
        attributes: The attributes, with their initial values.

    Raises:
        InvalidError: An attribute cannot be saved, or has the name of a method.
    """

    if TYPE_CHECKING:
        # The attributes that the constructor takes.
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise InvalidError(f"an attribute cannot be named `{name}`")
            setattr(self, name, value)
        self._names = tuple(attributes)
        # Number of the last commit; larger is newer. In a job that deals its records, what it has seen, if that is known.
        self._number, self._record = 0, b""
        # A later state of which it is not known whether it counts, with its number; of a job that counts records.
        self._candidate: Optional[Tuple[int, Buffer]] = None
        # The file of commits, how many commits lie between two that are written, and how many have not been.
        self._path: Optional[str] = None
        self._every = 1
        self._unwritten = 0
        self._saved: Buffer = encode(self._captured())

    def save_to(self, path: Union[str, "os.PathLike[str]"], *, every: int = 1) -> None:
        """Lets rank 0 write commits to a file, for the case that no worker and no agent is left.

        ::

            state = steadfast.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)
            state.save_to("/shared/commit", every=10)

        A round in which no worker and no agent has a commit begins with the one in the file, and logs that as a
        warning. The file is replaced at once, so it always has a whole commit. It belongs to one job: remove it to
        start over. All workers call this, before the training function, with a path that they share; without a shared
        file system, the newest file of all workers is used.

        Args:
            path: Name of the file. Its directory exists.
            every: Writes each so many commits. A commit that is written takes as long as the disk.

        Raises:
            InvalidError: The directory does not exist, or ``every`` is less than 1.
        """
        named = os.path.abspath(os.fspath(path))
        if not os.path.isdir(os.path.dirname(named)):
            raise InvalidError(f"the directory of `{named}` does not exist")
        if every < 1:
            raise InvalidError(f"`every` is {every}; it is at least 1")
        self._path, self._every = named, every

    def save(self) -> None:
        """Copies all attributes of this moment, and gives the copy to the agent.

        In a job that counts records the copy counts once all workers have theirs.

        Raises:
            InvalidError: An attribute cannot be saved, or the workers have seen different records; the last copy stays.
            CollectiveError: A worker was lost before it had its copy; the last one stays.
        """
        self._keep(encode(self._captured()), self._number + 1, begins_with=(0, b""))

    def restore(self) -> None:
        """Goes back to the attributes that were last saved or synchronized, or else to the initial ones."""
        self._load(self._saved)

    def sync(self) -> None:
        """Gives all ranks the attributes of the rank with the newest commit, and saves them.

        They are all of this moment, not of the commit: no part is older than another one. Of several
        ranks with the newest commit it is the lowest, which is the oldest worker.
        """
        current = membership()
        place = current.assignment
        self._settle(place.commit)
        if self._number == 0:
            self._resume(current)
        # If the exchange fails, what happened before it is not lost.
        self._saved = encode(self._captured())
        (newest,) = current.group.max([self._number])
        stored = 0
        # All workers know what the others have, so all look for files, or none.
        if self._path is not None and (newest == 0 or newest < place.commit):
            stored = _file.number_of(self._path)
            (newest,) = current.group.max([max(newest, stored)])
        if newest < place.commit:
            _LOG.warning("no worker and no agent has the last commit: going back to an earlier one")
        # Of those that have it, the lowest rank.
        has_newest = newest in (self._number, stored)
        (found,) = current.group.max([place.world_size - place.rank if has_newest else 0])
        root = place.world_size - found
        if place.rank == root and self._path is not None and self._number != newest:
            self._read(self._path)
        data = current.group.broadcast_bytes(self._saved if place.rank == root else None, root)
        record = b""
        if place.is_dynamic:
            record = bytes(current.group.broadcast_bytes(self._record if place.rank == root else None, root))
        if place.rank != root:
            self._load(data)
        self._keep(data, newest + 1, begins_with=(newest, record))

    def reset(self) -> None:
        """Divides what samplers and datasets have left among the workers of the new round."""
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, Divided):
                value.reset()

    def on_round(self) -> None:
        """Checks that all workers divide the data likewise, once their group is formed.

        Raises:
            InvalidError: They have made a sampler or dataset with other settings.
        """
        current = membership()
        for name in self._names:
            value = getattr(self, name)
            settings = value.settings() if isinstance(value, Divided) else []
            if settings and current.assignment.world_size > 1:
                check_alike(current.group.max, f"`{name}`", settings)

    def _settle(self, decided: int) -> None:
        """Goes on from the state of which it was not known whether it counts, if it does."""
        candidate, self._candidate = self._candidate, None
        if candidate is not None and candidate[0] == decided:
            (self._number, self._saved), self._record = candidate, b""
            self._load(self._saved)

    def _resume(self, current: Membership) -> None:
        """Continues from the commit that the agent keeps from an earlier process, if there is one."""
        kept = current.agent.get_commit()
        if kept is None:
            return
        number, data = kept
        record = current.agent.get_commit_record() if current.assignment.is_dynamic else b""
        if current.assignment.is_dynamic and number != current.assignment.commit and not record:
            # Records that it has seen would be dealt again.
            _LOG.warning("it is not known which records commit %d has seen: not going on from it", number)
            return
        self._load(data)
        self._saved, self._number, self._record = data, number, record

    def _read(self, path: str) -> None:
        """Continues from the commit in a file."""
        number, data, record = _file.read(path)
        self._load(data)
        self._saved, self._number, self._record = data, number, record
        _LOG.warning("no worker and no agent has a commit: going on from commit %d in %s", number, path)

    def _keep(self, data: Buffer, number: int, *, begins_with: Tuple[int, bytes]) -> None:
        """Makes a copy of the state the last commit, with this number unless the job counts records.

        Args:
            begins_with: At the beginning of a round, the number of the commit that it begins with, and what that has seen.
        """
        current = membership()
        if current.assignment.records:
            self._decide(current, data, begins_with)
        else:
            self._saved, self._number = data, number
            _put(current, number, data)
        self._write(current.assignment)

    def _decide(self, current: Membership, data: Buffer, begins_with: Tuple[int, bytes]) -> None:
        """Makes a copy of the state the last commit once all workers have theirs."""
        number, records = current.next_commit, current.assignment.records
        divided = self._divided(records)
        reached = divided.place(records) if current.assignment.is_dynamic else divided.position(records)
        _put(current, number, data)
        self._candidate = number, data
        if isinstance(reached, int):
            self._record = current.decide_dynamic_commit(reached, *begins_with)
        else:
            current.decide_commit(reached)
        self._number, self._saved = self._candidate
        self._candidate = None

    def _divided(self, records: int) -> Divided:
        """Returns the attribute that says which records the state has seen."""
        values = (getattr(self, name) for name in self._names)
        divided = [value for value in values if isinstance(value, Divided)]
        if len(divided) != 1:
            raise InvalidError(
                f"the job counts records (`records = {records}`), so its state has one ElasticSampler, DataShardService or "
                f"TaskDataset; it has {len(divided)}"
            )
        return divided[0]

    def _write(self, place: Assignment) -> None:
        """Writes the last commit to the file, if it is time."""
        self._unwritten += 1
        if self._path is None or place.rank != 0 or self._unwritten < self._every:
            return
        _file.write(self._path, self._number, self._saved, self._record, mark=str(place.round))
        self._unwritten = 0

    def _captured(self) -> Dict[str, Any]:
        values = {}
        for name in self._names:
            stateful = self._stateful(name)
            values[name] = getattr(self, name) if stateful is None else stateful.state_dict()
        return values

    def _load(self, data: Buffer) -> None:
        values = decode(data)
        if set(values) != set(self._names):
            raise InvalidError(
                f"the saved state has the attributes {', '.join(values) or 'none'}; "
                f"this one has {', '.join(self._names) or 'none'}"
            )
        for name, value in values.items():
            stateful = self._stateful(name)
            if stateful is None:
                setattr(self, name, value)
            else:
                stateful.load_state_dict(value)

    def _stateful(self, name: str) -> Optional[Any]:
        """Returns what saves and loads the attribute; ``None`` for a plain value."""
        value = getattr(self, name)
        methods = (getattr(value, method, None) for method in ("state_dict", "load_state_dict"))
        if all(callable(method) for method in methods):
            return value
        variables = variables_of(value)
        return Variables(name, variables) if variables else None


def _put(current: Membership, number: int, data: Buffer) -> None:
    """Gives a copy of the state to the agent. All workers of a node have the same."""
    if current.assignment.local_rank == 0:
        current.agent.put_commit(number, [data])
