"""Commits in a file, for jobs of which nothing else is left."""

from __future__ import annotations

import logging
import os
import pathlib
import sys
from typing import Any, List

import numpy as np
import pytest
import steadfast
from nodes import Nodes
from steadfast import elastic
from steadfast.elastic import _file
from threads import Threads

PROGRAM = """
import sys
import time
import numpy as np
import steadfast.elastic as elastic

state = elastic.ObjectState(values=np.zeros(100_000), step=0)
state.save_to(sys.argv[1])

@elastic.run
def train(state):
    assert (state.values == state.step).all()
    print("begins at", state.step, "of", elastic.assignment().world_size, flush=True)
    while True:
        state.step += 1
        state.values += 1
        state.commit()
        print("committed", state.step, flush=True)
        time.sleep(0.01)

train(state)
"""


def numbers(log: pathlib.Path, word: str) -> List[int]:
    text = log.read_text() if log.exists() else ""
    return [int(line.split(word)[1].split()[0]) for line in text.splitlines() if word in line]


def test_a_job_goes_on_from_its_file_when_every_process_was_killed(tmp_path):
    """S001-24: agents, workers, master and etcd are gone; the step number continues."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    command = [sys.executable, str(file), str(tmp_path / "commit")]
    done = 0
    for attempt in range(2):
        logs = tmp_path / str(attempt)
        logs.mkdir()
        with Nodes(2, 2, logs) as nodes:
            nodes.add(command)
            nodes.add(command)
            log = logs / "node-1.log"
            nodes.until(lambda log=log: len(numbers(log, "committed ")) > 10, "commits")
        (begin, *_) = numbers(log, "begins at ")
        # The last commit may have been written, but not printed.
        assert begin in (0, *range(done, done + 3)) and (begin > 0) == (attempt > 0)
        both = [it for name in ("node-1.log", "node-2.log") for it in numbers(logs / name, "committed ")]
        done = max(both)
        said = "".join((logs / name).read_text() for name in ("node-1.log", "node-2.log"))
        assert ("no worker and no agent has a commit: going on from commit" in said) == (attempt > 0)


def trained(path: pathlib.Path, *members: str, steps: int, every: int = 1, paths: Any = None) -> List[Any]:
    """Trains on workers that nothing is left of; returns where each began."""
    with Threads(*members) as workers:

        def program(member: str, membership: elastic.Membership) -> Any:
            begins = []

            @elastic.run(membership=membership)
            def train(state):
                begins.append((state.step, state.weights.tolist()))
                for _ in range(steps):
                    state.step += 1
                    state.weights += 1
                    state.commit()

            state = elastic.ObjectState(step=0, weights=np.zeros(2))
            state.save_to(paths[member] if paths else path, every=every)
            train(state)
            return begins

        return workers.run(program, *members)


def test_a_round_without_a_commit_begins_with_the_file_and_says_so(tmp_path, caplog):
    """S001-24"""
    path = tmp_path / "commit"
    assert trained(path, "a", "b", steps=3) == [[(0, [0.0, 0.0])]] * 2
    assert not caplog.records
    # For another number of workers, too.
    with caplog.at_level(logging.WARNING, logger="steadfast.elastic"):
        assert trained(path, "a", "b", "c", steps=1) == [[(3, [3.0, 3.0])]] * 3
    (said,) = [it.getMessage() for it in caplog.records]
    assert said.startswith("no worker and no agent has a commit: going on from commit 4 in") and str(path) in said
    # Numbers go on, so the newest commit stays the newest.
    assert _file.number_of(str(path)) == 6
    assert os.listdir(tmp_path) == ["commit"]


def test_without_a_shared_file_system_the_newest_file_is_used(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    trained(one, "a", steps=2)
    trained(other, "a", steps=5)
    found = trained(one, "a", "b", "c", steps=0, paths={"a": tmp_path / "none", "b": other, "c": one})
    assert found == [[(5, [5.0, 5.0])]] * 3


def test_only_some_commits_are_written_on_request(tmp_path):
    path = tmp_path / "commit"
    trained(path, "a", steps=6, every=5)
    # The synchronization at the start is the first one; the fifth has four steps.
    assert trained(path, "a", steps=0) == [[(4, [4.0, 4.0])]]


def test_a_commit_that_a_worker_or_an_agent_has_comes_before_the_file(tmp_path):
    """A file of another job, or of a node that was away, does not take a running job back or over."""
    path = tmp_path / "commit"
    trained(path, "a", steps=50)
    agent = elastic.SoloAgent()
    kept = elastic.ObjectState(step=7)
    agent.get_commit = lambda: (3, kept._saved)
    membership = elastic.Membership(agent, lambda _: elastic.SoloGroup())
    state = elastic.ObjectState(step=0)
    state.save_to(path)
    assert elastic.run(membership=membership)(lambda state: state.step)(state) == 7


def test_a_write_that_fails_leaves_the_old_commit(tmp_path, monkeypatch):
    path = tmp_path / "commit"
    _file.write(str(path), 1, b"first", b"", mark="0")

    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        _file.write(str(path), 2, b"second", b"", mark="0")
    assert _file.read(str(path)) == (1, b"first", b"")


def test_a_file_that_is_damaged_or_no_commit_is_refused_by_name(tmp_path):
    path = tmp_path / "commit"
    trained(path, "a", steps=1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(steadfast.InvalidError, match="commit in `.*commit` is damaged; remove"):
        trained(path, "a", steps=0)
    path.write_bytes(b"something else")
    with pytest.raises(steadfast.InvalidError, match="commit` is no commit; name another file"):
        trained(path, "a", steps=0)
    with pytest.raises(steadfast.InvalidError, match="directory of .* does not exist"):
        elastic.ObjectState().save_to(tmp_path / "none" / "commit")
    with pytest.raises(steadfast.InvalidError, match="`every` is 0"):
        elastic.ObjectState().save_to(path, every=0)
