"""The blocks of docs/coming-from-launchers.md: programs train while workers come and go, commands run."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import shlex
import subprocess
from typing import Any, Iterator

import numpy as np
import pytest

pytest.importorskip("torch")
import workers
from nodes import PROGRAM
from test_elastic_processes import Job, context  # noqa: F401

from coordinator import free_port

PAGE = (pathlib.Path(__file__).resolve().parents[3] / "docs" / "coming-from-launchers.md").read_text()

LIBRARIES = {"with_lightning": "pytorch_lightning", "with_accelerate": "accelerate", "with_trainer": "transformers"}
"""The library that each program needs, if any."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def programs() -> dict[str, str]:
    """The programs of the page, by the name of the file."""
    found = {}
    for text in blocks("python"):
        name = re.match(r"# (\w+)\.py\n", text)
        assert name, text
        found[name[1]] = text
    return found


@pytest.fixture
def written(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory with the programs of the page."""
    for name, text in programs().items():
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path


@pytest.mark.parametrize("name", programs())
def test_a_program_of_the_page_keeps_what_it_trains_while_workers_die_and_come(
    context: Any,  # noqa: F811
    written: pathlib.Path,
    name: str,
) -> None:
    """Its optimizer, its schedule and its position: it ends as one worker ends that nothing disturbs.

    transformers#40245, lightning#19764, elastic#97: also in the middle of an epoch, with another number of workers.
    """
    library = LIBRARIES.get(name)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; scripts/python-environment installs it")
    program = str(written / f"{name}.py")
    with Job(context, "alone", daemon=False) as job:
        job.start(workers.page, "alone", path=program)
        expected = job.ends()["alone"]
    assert expected[0] == 1 and expected[1] == 2
    with Job(context, "a", "b", daemon=False) as job:
        job.start(workers.page, "a", path=program, pauses_at=9)
        job.start(workers.page, "b", path=program, dies_at=5)
        job.lose("b")
        job.until("paused", "a")
        job.coordinator.add("c")
        job.start(workers.page, "c", path=program)
        ends = job.ends()
    assert set(ends) == {"a", "c"}
    for world_size, epoch, step, rate, weights in ends.values():
        assert world_size == 2
        assert [epoch, step, rate] == expected[1:4]
        for found, value in zip(weights, expected[4]):
            assert np.allclose(found, value, rtol=1e-4, atol=1e-5), name


def command(of: str) -> list[str]:
    """The command of the page that has this text."""
    (found,) = [it for it in blocks("sh") if of in it]
    return [PROGRAM, *shlex.split(found)[1:]]


def run(directory: pathlib.Path, arguments: list[str]) -> "subprocess.Popen[str]":
    """Starts a command in the directory of the programs."""
    return subprocess.Popen(
        arguments,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ends(*processes: "subprocess.Popen[str]") -> list[str]:
    """Waits until all have succeeded; returns what they printed."""
    try:
        printed = [it.communicate(timeout=120)[0] for it in processes]
    finally:
        for it in processes:
            it.kill()
    # In full: the message of a failed assertion is cut.
    print(*printed, sep="\n")
    assert [it.returncode for it in processes] == [0] * len(processes)
    return printed


def test_the_command_for_one_machine_trains(written: pathlib.Path) -> None:
    (printed,) = ends(run(written, command("--standalone")))
    assert printed.count("finished after 16 steps") == 1, printed
    assert "[rank 0] finished" in printed


def test_the_commands_for_several_nodes_train(written: pathlib.Path) -> None:
    def here(of: str) -> list[str]:
        """The command with ports of this test, for two nodes on this machine, of one worker each."""
        changes = {"0.0.0.0:2379": rendezvous, "node-0:2379": rendezvous, "0.0.0.0:7070": master, "1:4": "1:2"}
        arguments = [it.replace("per-node=2", "per-node=1") for it in command(of)]
        for text, change in changes.items():
            arguments = [it.replace(text, change) for it in arguments]
        return arguments

    rendezvous, master = (f"127.0.0.1:{free_port()}" for _ in range(2))
    started = [run(written, here(of)) for of in ("steadfast rendezvous", "--max-restarts", "--max-restarts")]
    printed = "".join(ends(*started))
    assert printed.count("finished after 16 steps") == 1, printed


def test_the_command_with_a_discovery_script_trains(written: pathlib.Path) -> None:
    (script,) = [it for it in blocks("sh") if it.startswith("# hosts.sh")]
    (written / "hosts.sh").write_text(f"#!/bin/sh\n{script}")
    (written / "hosts.sh").chmod(0o755)
    arguments = command("steadfast launch")
    at = arguments.index("--")
    (printed,) = ends(run(written, [*arguments[:at], "--last-call", "1s", *arguments[at:]]))
    assert printed.count("finished after 16 steps") == 1, printed
