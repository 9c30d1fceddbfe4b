"""Jobs of real `torchrun` processes over a real master, with a training script that only knows PyTorch."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import time

import pytest

pytest.importorskip("torch")

from torchrun_cluster import Cluster, Masters  # noqa: E402

from coordinator import free_port  # noqa: E402

both = pytest.mark.parametrize("backend", ["steadfast", "steadfast-c10d"])


def conf(backend: str) -> str:
    """Returns settings with which PyTorch's own algorithm notices lost nodes soon."""
    return "last_call_timeout=3,keep_alive_interval=1" if backend == "steadfast-c10d" else ""


@both
def test_a_node_replaces_a_machine_that_was_lost(tmp_path: pathlib.Path, backend: str) -> None:
    """horovod#2652: the new node takes part in the collectives of the others."""
    with Cluster(tmp_path, backend, "1:3", script="sum") as cluster:
        nodes = {it.name: it for it in cluster.start("a", "b", "c", conf=conf(backend))}
        workers = cluster.running("abc")
        assert [it["rank"] for it in workers] == [0, 1, 2]
        # The one that hosts the store.
        lost = nodes.pop(workers[0]["node"])
        lost.kill()
        os.kill(workers[0]["pid"], signal.SIGKILL)
        before = cluster.running("".join(nodes))
        (nodes["d"],) = cluster.start("d", conf=conf(backend))
        after = cluster.running("".join(nodes))
        assert after[0]["store"] != before[0]["store"], "a store is used in one round only"
        cluster.finish(*nodes.values())
        assert len(cluster.events("finished")) == 3
        assert "Error waiting on exit barrier" not in cluster.logs(), cluster.logs()
        assert cluster.service.process.ends() == 0, "the coordinator ends with its job"


def test_nodes_go_on_at_once_without_an_agent_that_was_killed(tmp_path: pathlib.Path) -> None:
    """pytorch#111646: torchrun does not end the workers of that agent, so no other worker fails.

    horovod#3852: if one node finishes, the other one goes on.
    """
    with Cluster(tmp_path, "steadfast", "1:3") as cluster:
        nodes = {it.name: it for it in cluster.start("a", "b", "c")}
        first = cluster.running("abc")[0]
        killed_at = time.time()
        nodes.pop(first["node"]).kill()
        workers = cluster.running("".join(nodes))
        assert max(it["time"] for it in workers) - killed_at < 30, "no worker waits for a timeout"
        assert {it["torchelastic_restart_count"] for it in workers} == {0}
        started = len(cluster.events("started"))
        early = workers[0]["node"]
        (tmp_path / f"finish-{early}").touch()
        cluster.until(lambda: "Waiting 300 seconds" in nodes[early].text())
        assert cluster.service.status()["result"] is None
        cluster.finish(*nodes.values())
        assert len(cluster.events("started")) == started, "the other one went on"
        cluster.until(lambda: not cluster.workers())


@both
def test_nodes_stop_and_return_any_number_of_times(tmp_path: pathlib.Path, backend: str) -> None:
    """pytorch#67742, pytorch#147064, pytorch#182221: the other neither hangs nor ends.

    horovod#3852: a node that was stopped has not succeeded. Returning is no restart, either.
    """
    with Cluster(tmp_path, backend, "1:2") as cluster:
        nodes = {it.name: it for it in cluster.start("a", "b", conf=conf(backend))}
        cycles = 2 if backend == "steadfast" else 1
        for number in [signal.SIGTERM, signal.SIGINT] * cycles:
            # The one that hosts the store; the other one is the first afterwards.
            leaves, stays = [it["node"] for it in cluster.running("ab")]
            nodes[leaves].signal(number)
            (alone,) = cluster.running(stays)
            assert nodes[leaves].ends() != 0
            assert cluster.service.status()["result"] is None
            (nodes[leaves],) = cluster.start(leaves, conf=conf(backend))
            workers = cluster.running("ab")
            assert {it["torchelastic_restart_count"] for it in workers} == {0}
        cluster.finish(*nodes.values())
        assert cluster.service.process.ends() == 0


@both
def test_a_failed_worker_is_restarted_until_its_node_gives_up(tmp_path: pathlib.Path, backend: str) -> None:
    """pytorch#123678: a restart does not close the job. pytorch#67616: nor does a node that fails."""
    with Cluster(tmp_path, backend, "1:2") as cluster:
        good, bad = cluster.start("a", "b", conf=conf(backend), max_restarts=1)
        cluster.running("ab")
        cluster.fail_worker("b")
        cluster.until(lambda: len(cluster.events("started")) == 4)
        counts = {it["node"]: it["torchelastic_restart_count"] for it in cluster.running("ab")}
        assert counts == {"a": 0, "b": 1}
        cluster.fail_worker("b")
        assert bad.ends() == 1
        cluster.running("a")
        cluster.finish(good)


def test_too_few_nodes_wait_for_new_ones_and_leave_on_a_signal(tmp_path: pathlib.Path) -> None:
    """horovod#3494: the old node and the new one begin together."""
    with Cluster(tmp_path, "steadfast", "2:3", last_call="1s") as cluster:
        stays, leaves = cluster.start("a", "b")
        cluster.running("ab")
        leaves.signal(signal.SIGTERM)
        cluster.waits(1)
        (comes,) = cluster.start("c")
        assert {it["world_size"] for it in cluster.running("ac")} == {2}
        comes.signal(signal.SIGINT)
        cluster.waits(1)
        stays.signal(signal.SIGTERM)
        assert stays.ends() == 1
        assert "SignalException" in stays.text()
        cluster.until(lambda: _present(cluster) == 0)


def _present(cluster: Cluster) -> int:
    status = cluster.service.status()
    return sum(it["state"] != "gone" for it in status["nodes"]) if status else -1


def test_a_job_outlives_its_masters(tmp_path: pathlib.Path) -> None:
    """A master is killed while nodes gather, and the other one while they train."""
    with Cluster(tmp_path, "steadfast", "1:3", service=Masters, last_call="5s") as cluster:
        first = cluster.service.acting()
        nodes = cluster.start("a", "b")
        cluster.waits(2)
        first.kill()
        nodes += cluster.start("c")
        cluster.running("abc")
        started = len(cluster.events("started"))
        cluster.service.acting().kill()
        cluster.until(lambda: "changes of the job's nodes are not seen" in nodes[0].text())
        cluster.service.start_master()
        cluster.service.acting()
        cluster.finish(*nodes)
        assert len(cluster.events("started")) == started, "no worker was restarted"
        (late,) = cluster.start("d")
        assert late.ends() == 1
        assert "RendezvousClosedError: the job is over" in late.text()


def test_nodes_that_cannot_take_part_end_with_one_clear_error(tmp_path: pathlib.Path) -> None:
    with Cluster(tmp_path, "steadfast", "2:3") as cluster:
        endpoint = f"127.0.0.1:{free_port()}"
        errors = {
            "few": "RendezvousTimeoutError: .*waits for 1 more node to reach the minimum",
            "other": "RendezvousError: the node expects 1 to 2 nodes, and the job 2 to 3",
            "lost": f"RendezvousConnectionError: .*{endpoint}",
            "wrong": "InvalidError: .*`b` is not HOST:PORT; --rdzv-id is missing.*unknown key `lost_call`",
        }
        nodes = [
            *cluster.start("few", conf="join_timeout=8,last_call_timeout=1"),
            *cluster.start("other", nnodes="1:2"),
            *cluster.start("lost", conf="join_timeout=1", rdzv_endpoint=endpoint),
            *cluster.start("wrong", conf="lost_call=1", rdzv_id="none", rdzv_endpoint="a:1,b"),
        ]
        for node in nodes:
            assert node.ends() == 1
            assert re.search(errors[node.name], node.text()), cluster.logs()
        ignored = [it for it in nodes[0].text().splitlines() if "last_call_timeout is ignored" in it]
        assert len(ignored) == 1
