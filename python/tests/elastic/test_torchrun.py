"""Jobs of real `torchrun` processes, with a training script that only knows PyTorch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, Iterator, List

import pytest

HERE = pathlib.Path(__file__).parent
PACKAGE = HERE.parents[1]
sys.path.insert(0, str(HERE))

import fake_agent  # noqa: E402
import fake_service as service  # noqa: E402

if not any(
    it.name == "steadfast" for it in importlib.metadata.entry_points(group="torchrun.handlers")
):
    # The package is not installed: use its sources.
    sys.path.insert(0, str(PACKAGE))
    fake_agent.install()

Event = Dict[str, Any]
SECONDS_MAX = 240.0
"""Enough for a machine that is busy with something else. No test waits for a time to pass."""


class Node:
    """A `torchrun` process, and what it wrote."""

    def __init__(self, name: str, command: List[str], directory: pathlib.Path) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        environment = {**os.environ, "NODE": name, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(directory / "metadata"), *_sources()])
        environment.pop("TORCHELASTIC_ERROR_FILE", None)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=directory
            )

    def ends(self) -> int:
        return self.process.wait(SECONDS_MAX)

    def text(self) -> str:
        return self.log.read_text()


def _sources() -> List[str]:
    return [str(PACKAGE)] if str(PACKAGE) in sys.path else []


class Cluster:
    """The nodes of one job, and the events that their workers wrote down."""

    def __init__(self, directory: pathlib.Path, backend: str) -> None:
        self.directory, self.backend = directory, backend
        self.service = service.Service()
        self.nodes: List[Node] = []
        _write_metadata(directory / "metadata")

    def start(
        self, *names: str, nnodes: str, conf: str = "last_call_timeout=1", **flags: Any
    ) -> List[Node]:
        given = {
            "rdzv-id": "digits",
            "rdzv-endpoint": self.service.endpoint,
            "max-restarts": 3,
            **flags,
        }
        command = [
            sys.executable,
            str(HERE / "torchrun_with_fake_agent.py"),
            f"--rdzv-backend={self.backend}",
        ]
        command += [f"--nnodes={nnodes}", "--nproc-per-node=1", "--monitor-interval=0.1"]
        command += [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
        command += ([f"--rdzv-conf={conf}"] if conf else []) + [
            str(HERE / "sum_until_finished.py"),
            str(self.directory),
        ]
        started = [Node(name, command, self.directory) for name in names]
        self.nodes += started
        return started

    def events(self, event: str = "") -> List[Event]:
        path = self.directory / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        return [it for it in map(json.loads, lines) if event in ("", it["event"])]

    def running(self, nodes: str) -> List[Event]:
        """Waits until these nodes train together, and returns their workers."""

        def newest() -> List[Event]:
            return list({it["node"]: it for it in self.events("started")}.values())

        def together() -> bool:
            workers = [it for it in newest() if it["node"] in nodes]
            return len(workers) == len(nodes) and all(
                it["world_size"] == len(nodes) and it["store"] == workers[0]["store"]
                for it in workers
            )

        self.until(together)
        return sorted((it for it in newest() if it["node"] in nodes), key=lambda it: it["rank"])

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while not holds():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def finish(self, *nodes: Node) -> None:
        (self.directory / "finish").touch()
        codes = {node.name: node.ends() for node in nodes}
        assert set(codes.values()) == {0}, f"{codes}\n{self.logs()}"

    def logs(self) -> str:
        return "\n".join(f"== {it.name}\n{it.text()[-6000:]}" for it in self.nodes)

    def close(self) -> None:
        for node in self.nodes:
            if node.process.poll() is None:
                node.process.kill()
                node.process.wait()
        for worker in _workers(self.directory):
            os.kill(worker, signal.SIGKILL)
        self.service.close()


def _workers(directory: pathlib.Path) -> List[int]:
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            str(HERE / "sum_until_finished.py").encode() in arguments
            and str(directory).encode() in arguments
        ):
            found.append(int(process.name))
    return found


def _write_metadata(directory: pathlib.Path) -> None:
    """Registers the entry points of the sources, as an installed package has them."""
    if not _sources():
        return
    import tomllib

    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    info = directory / "steadfast-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: steadfast\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture(params=["steadfast"])
def cluster(request, tmp_path: pathlib.Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, request.param)
    yield made
    made.close()


both = pytest.mark.parametrize("cluster", ["steadfast", "steadfast-c10d"], indirect=True)


@both
def test_one_node_trains_a_script_that_only_knows_pytorch(cluster: Cluster) -> None:
    nodes = cluster.start("a", nnodes="1")
    assert [it["rank"] for it in cluster.running("a")] == [0]
    cluster.finish(*nodes)


@both
def test_three_nodes_train_together(cluster: Cluster) -> None:
    nodes = cluster.start("a", "b", "c", nnodes="3")
    workers = cluster.running("abc")
    assert [it["rank"] for it in workers] == [0, 1, 2]
    assert {it["torchelastic_restart_count"] for it in workers} == {0}
    cluster.finish(*nodes)
    assert len(cluster.events("finished")) == 3
    assert "Error waiting on exit barrier" not in cluster.logs(), cluster.logs()


@both
def test_a_node_that_arrives_is_added_without_counting_as_a_restart(cluster: Cluster) -> None:
    nodes = cluster.start("a", "b", nnodes="2:3")
    before = cluster.running("ab")
    nodes += cluster.start("c", nnodes="2:3")
    workers = cluster.running("abc")
    assert {it["torchelastic_restart_count"] for it in workers} == {0}
    assert workers[0]["store"] != before[0]["store"], "a store is used in one round only"
    cluster.finish(*nodes)


def test_nodes_go_on_at_once_without_an_agent_that_was_killed(cluster: Cluster) -> None:
    """The workers of the killed agent live on, so no other worker fails (pytorch#111646)."""
    nodes = {
        it.name: it
        for it in cluster.start("a", "b", "c", nnodes="1:3", conf="last_call_timeout=60")
    }
    # The one that hosts the store.
    first = cluster.running("abc")[0]
    killed = nodes.pop(first["node"])
    killed_at = time.time()
    killed.process.kill()
    workers = cluster.running("".join(nodes))
    assert max(it["time"] for it in workers) - killed_at < 60, (
        "nobody waits for a last call, or a timeout"
    )
    assert {it["torchelastic_restart_count"] for it in workers} == {0}
    cluster.finish(*nodes.values())
    cluster.until(lambda: not _workers(cluster.directory))


@both
def test_nodes_go_on_without_a_machine_that_was_lost(cluster: Cluster) -> None:
    conf = "last_call_timeout=1" + (
        ",keep_alive_interval=1" if cluster.backend == "steadfast-c10d" else ""
    )
    nodes = {it.name: it for it in cluster.start("a", "b", "c", nnodes="1:3", conf=conf)}
    first = cluster.running("abc")[0]
    lost = nodes.pop(first["node"])
    lost.process.kill()
    os.kill(first["pid"], signal.SIGKILL)
    cluster.running("".join(nodes))
    cluster.finish(*nodes.values())


def test_a_node_that_was_stopped_can_return(cluster: Cluster) -> None:
    """pytorch#67742, pytorch#147064: the others neither hang nor end."""
    stays, leaves = cluster.start("a", "b", nnodes="1:2")
    cluster.running("ab")
    leaves.process.terminate()
    cluster.running("a")
    assert leaves.ends() != 0
    (returns,) = cluster.start("b", nnodes="1:2")
    cluster.running("ab")
    cluster.finish(stays, returns)


@both
def test_a_worker_that_failed_is_restarted_and_counted(cluster: Cluster) -> None:
    nodes = cluster.start("a", "b", nnodes="2")
    before = cluster.running("ab")
    (cluster.directory / "fail-b").touch()
    cluster.until(lambda: len(cluster.events("started")) == 4)
    after = {it["node"]: it for it in cluster.running("ab")}
    assert after["b"]["torchelastic_restart_count"] == 1
    assert after["a"]["pid"] not in [it["pid"] for it in before]
    cluster.finish(*nodes)


def test_a_node_whose_worker_fails_too_often_leaves_the_job_to_the_others(cluster: Cluster) -> None:
    """pytorch#67616: the job is not closed by a node that fails."""
    (good,) = cluster.start("a", nnodes="1:2")
    cluster.running("a")
    (bad,) = cluster.start("b", nnodes="1:2", max_restarts=0)
    cluster.running("ab")
    (cluster.directory / "fail-b").touch()
    assert bad.ends() == 1
    cluster.running("a")
    cluster.finish(good)


def test_a_signal_ends_a_node_that_waits_for_others(cluster: Cluster) -> None:
    (node,) = cluster.start("a", nnodes="2")
    job = lambda: cluster.service.jobs.get("digits")  # noqa: E731
    cluster.until(lambda: job() is not None and len(job().waiting) == 1)
    node.process.terminate()
    assert node.ends() == 1
    assert "SignalException" in node.text()
    cluster.until(lambda: job().addresses == {})


def test_too_few_nodes_end_with_one_clear_error(cluster: Cluster) -> None:
    (node,) = cluster.start("a", nnodes="2", conf="join_timeout=1")
    assert node.ends() == 1
    assert "RendezvousTimeoutError: 1 of 2 nodes joined" in node.text()


def test_a_job_that_succeeded_is_closed(cluster: Cluster) -> None:
    (node,) = cluster.start("a", nnodes="1:2")
    cluster.running("a")
    cluster.finish(node)
    (late,) = cluster.start("b", nnodes="1:2")
    assert late.ends() == 1
    assert "RendezvousClosedError: the job has ended" in late.text()


def test_nodes_with_other_ranges_are_refused(cluster: Cluster) -> None:
    (node,) = cluster.start("a", nnodes="1:2")
    cluster.running("a")
    (other,) = cluster.start("b", nnodes="1:3")
    assert other.ends() == 1
    assert "RendezvousError: the node expects" in other.text()
    cluster.finish(node)


def test_workers_do_not_need_the_master(cluster: Cluster) -> None:
    nodes = cluster.start("a", "b", nnodes="1:2")
    cluster.running("ab")
    cluster.service.available = False
    cluster.until(lambda: "changes of the job's nodes are not seen" in nodes[0].text())
    cluster.service.available = True
    cluster.finish(*nodes)
    assert len(cluster.events("started")) == 2, "no worker was restarted"


def test_every_error_of_the_command_line_is_in_one_message(cluster: Cluster) -> None:
    (node,) = cluster.start(
        "a", nnodes="1", conf="lost_call=1", rdzv_id="none", rdzv_endpoint="a:1,b"
    )
    assert node.ends() == 1
    message = next(it for it in node.text().splitlines() if "InvalidError: " in it)
    assert "`b` is not HOST:PORT" in message
    assert "--rdzv-id is missing" in message
    assert "unknown key `lost_call`" in message
