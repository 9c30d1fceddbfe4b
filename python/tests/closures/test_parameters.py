"""Closures that train parameters on parameter servers, while every role is killed."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from typing import Iterator, Optional

import numpy
import pytest
import steadfast
import steps
from closure_workers import HERE, Cluster, Process, free_port, until

JOB = """
name = "counting"
mode = "async"

[model]
kind = "closures"

[optimizer]
kind = "sgd"

[learning_rate]
base = 1.0

[checkpoint]
every = "500ms"
"""

KILLS_MAX = 40

PROGRAM = """
import sys
import numpy
import steadfast
import steps

endpoint, count, *workers = sys.argv[1:]
zeros = {"left": numpy.zeros(3), "right": numpy.zeros((2, 2))}
args = ["--lease-ttl", "1s", "--worker-losses-max", "1000"]
with steadfast.Coordinator(workers, job="counting", endpoints=endpoint, parameters=zeros, args=args) as coordinator:
    print("begins", flush=True)
    for number in range(int(count)):
        coordinator.schedule(steps.counts, name=f"step-{number}")
    coordinator.join()
    print("joined", flush=True)
    coordinator.finish_job()
    for name, values in coordinator.get_parameters().items():
        print(name, set(values.ravel().tolist()), flush=True)
"""


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()


@pytest.fixture
def run(tmp_path) -> Iterator[steadfast.LocalRun]:
    """A job of closures without a program."""
    file = tmp_path / "counting.toml"
    file.write_text(JOB)
    job = steadfast.Job.from_file(file)
    with steadfast.local(job, data_dir=tmp_path / "job", lease_ttl="1s", progress=False) as run:
        yield run


def zeros() -> dict:
    return {"left": numpy.zeros(3), "right": numpy.zeros((2, 2))}


def start_worker(cluster: Cluster, run: steadfast.LocalRun, threads: int = 1, address: Optional[str] = None) -> str:
    args = ["--etcd-endpoints", run.endpoint, "--threads", str(threads)]
    return cluster.start(str(HERE / "steps.py"), *args, address=address)


def until_begun(program: Process) -> None:
    until(lambda: program.code() is not None or "begins" in program.output())


def audit(run: steadfast.LocalRun) -> dict:
    """The audit of a job that has ended, from its directory."""
    command = ["steadfast", "audit", "--data-dir", str(run.data_dir), "--job", "counting", "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_closures_train_parameters_that_outlive_the_program(cluster, run):
    """S000-20: variables live on the parameter servers; a later program goes on with their values."""
    worker = start_worker(cluster, run)
    with steadfast.Coordinator([worker], job="counting", endpoints=run.endpoint, parameters=zeros()) as coordinator:
        values = [coordinator.schedule(steps.counts) for _ in range(10)]
        coordinator.join()
        assert coordinator.fetch(values) == [float(number) for number in range(10)]
        assert set(coordinator.get_parameters()["right"].ravel()) == {10.0}
    other = {name: value + 7 for name, value in zeros().items()}
    with steadfast.Coordinator([worker], job="counting", endpoints=run.endpoint, parameters=other) as coordinator:
        assert coordinator.schedule(steps.counts).fetch() == 10.0
        sha256 = coordinator.save_model(str(cluster.logs / "now.safetensors"))
        coordinator.finish_job()
        assert set(coordinator.get_parameters()["left"]) == {11.0}
    summary = run.wait(timeout=60)
    assert (summary["state"], summary["examples"], summary["parameters_sha256"]) == ("finished", 11, sha256)
    report = audit(run)
    assert "the push of each of 11 closures counts once on every slot" in report["proved"], report
    with pytest.raises(steadfast.SteadfastError):
        steadfast.Coordinator([worker], job="counting", endpoints=run.endpoint, parameters=zeros())


def test_what_cannot_be_pushed_is_an_error_of_the_closure(cluster, run):
    worker = start_worker(cluster, run)
    one = {"left": numpy.ones(3)}
    with steadfast.Coordinator(
        [worker], job="counting", endpoints=run.endpoint, parameters=zeros(), on_error="continue"
    ) as coordinator:
        for gradient, more, error in [
            ({"middle": numpy.ones(3)}, {}, "there is no parameter `middle`; the model has left, right"),
            ({"left": numpy.ones(4)}, {}, "an array of shape"),
            ({"left": numpy.array([1.0, numpy.nan, 1.0])}, {}, "not finite"),
            (one, {"again": True}, "the closure has pushed before"),
            (one, {"then_raises": True}, "after the push"),
        ]:
            with pytest.raises(steadfast.ClosureError, match=error):
                coordinator.schedule(steps.pushes, (gradient,), more).fetch()
        coordinator.schedule(steps.pushes, (one,)).fetch()
        # What is missing in a gradient counts as zero.
        parameters = coordinator.get_parameters()
        assert (set(parameters["left"]), set(parameters["right"].ravel())) == ({-1.0}, {0.0})
        # A closure without a push is none of the slots' business.
        assert coordinator.schedule(steps.add, (1,)).fetch() == 2


def test_parameters_without_their_job_are_refused(cluster, run):
    with pytest.raises(steadfast.InvalidError, match="parameters belong to a job"):
        steadfast.Coordinator([], parameters=zeros())
    for parameters, error in [({}, "is empty"), ({"w": ["a"]}, "the value of `w`")]:
        with pytest.raises((steadfast.InvalidError, TypeError), match=error):
            steadfast.Coordinator([], job="counting", endpoints=run.endpoint, parameters=parameters)
    worker = start_worker(cluster, run)
    with steadfast.Coordinator([worker]) as coordinator:
        with pytest.raises(steadfast.InvalidError, match="has no parameters"):
            coordinator.get_parameters()
        with pytest.raises(steadfast.ClosureError, match="the coordinator has no parameters"):
            coordinator.schedule(steps.counts).fetch()


def test_another_program_has_the_same_parameters(cluster, run):
    worker = start_worker(cluster, run)
    with steadfast.Coordinator([worker], job="counting", endpoints=run.endpoint, parameters=zeros()) as coordinator:
        coordinator.schedule(steps.counts)
    other = {"left": numpy.zeros(5)}
    error = r"has trained left \[3\], right \[2, 2\], and this program has left \[5\]"
    with pytest.raises(steadfast.ConflictError, match=error):
        steadfast.Coordinator([worker], job="counting", endpoints=run.endpoint, parameters=other)


def test_with_certificates_each_process_has_those_of_its_role(cluster, tmp_path):
    """F50: program, worker, master and pserver with mutual TLS; the worker is found in etcd."""
    certs = tmp_path / "certs"
    subprocess.run(["steadfast", "certs", "init", "--dir", str(certs)], check=True, capture_output=True, timeout=60)
    etcd, job = f"127.0.0.1:{free_port()}", tmp_path / "counting.toml"
    job.write_text(JOB)
    common = ["--job", "counting", "--etcd-endpoints", etcd]
    cluster.run(["steadfast", "etcd", "--listen", etcd, "--data-dir", str(tmp_path / "etcd")], "etcd")
    master = [
        "steadfast-master",
        *common,
        "--job-file",
        str(job),
        "--store",
        str(tmp_path / "store"),
        "--pservers",
        "1",
    ]
    cluster.run([*master, "--tls", str(certs / "master")], "master")
    cluster.run(["steadfast-pserver", *common, "--tls", str(certs / "pserver")], "pserver")
    cluster.start(str(HERE / "steps.py"), *common, "--tls", str(certs / "trainer"))
    args = ["--tls", str(certs / "admin")]
    with pytest.raises(steadfast.InvalidError, match="also needs the certificates of a trainer"):
        steadfast.Coordinator(job="counting", endpoints=etcd, parameters=zeros(), args=args)
    args += ["--trainer-tls", str(certs / "trainer")]
    with steadfast.Coordinator(job="counting", endpoints=etcd, parameters=zeros(), args=args) as coordinator:
        for _ in range(10):
            coordinator.schedule(steps.counts)
        coordinator.finish_job()
        assert set(coordinator.get_parameters()["left"]) == {10.0}


def values_of_all(coordinator) -> set:
    return {value for array in coordinator.get_parameters().values() for value in array.ravel().tolist()}


def test_a_rollback_of_the_parameters_runs_again_what_it_undoes(cluster, run):
    """S000-20: a pserver loses its memory, and each closure counts once all the same."""
    worker = start_worker(cluster, run)
    with steadfast.Coordinator([worker], job="counting", endpoints=run.endpoint, parameters=zeros()) as coordinator:
        for kills in range(4):
            values = [coordinator.schedule(steps.counts) for _ in range(200)]
            coordinator.fetch(values)
            run.kill("pserver", kills % 2)
            coordinator.schedule(steps.counts).fetch()
            coordinator.join()
            assert values_of_all(coordinator) == {201.0 * (kills + 1)}
        # What was read before the pserver is lost is not what counts when it is back.
        run.kill("pserver", 0)
        assert values_of_all(coordinator) == {804.0}
        until(lambda: run.status()["generation"] == 6)
        assert values_of_all(coordinator) == {804.0}


def test_each_closure_counts_once_while_every_role_is_killed(cluster, run, tmp_path):
    """S000-20: 10 000 closures count exactly 10 000 on every slot, while program, workers, pservers, and masters are
    killed again and again."""
    count, rng = 10_000, random.Random(7)
    workers = [start_worker(cluster, run, threads=4) for _ in range(2)]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), run.endpoint, str(count), *workers]
    env = {"PYTHONPATH": str(HERE)}
    roles, kills = ["program", "pserver", "worker", "master"], 0
    process = cluster.run(command, "program", env)
    while process.code() is None:
        time.sleep(rng.uniform(0.2, 1.2))
        if "joined" in process.output() or KILLS_MAX <= kills:
            continue
        role = roles[kills % len(roles)]
        if role == "program":
            process.kill()
            process = cluster.run(command, f"program-{kills}", env)
            until_begun(process)
        elif role == "worker":
            address = rng.choice(workers)
            cluster[address].kill()
            start_worker(cluster, run, threads=4, address=address)
        else:
            with contextlib.suppress(steadfast.NotFoundError):
                run.kill(role, rng.randrange(2) if role == "pserver" else 0)
        kills += 1
    assert process.wait() == 0, process.output()
    assert f"left {{{float(count)}}}\nright {{{float(count)}}}" in process.output(), (kills, process.output())
    assert 2 * len(roles) <= kills
    assert run.wait(timeout=60)["examples"] == count
    report = audit(run)
    assert f"the push of each of {count} closures counts once on every slot" in report["proved"], report
