"""A coordinator and its workers, as processes that are killed, stopped and replaced."""

from __future__ import annotations

import collections
import contextlib
import math
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Dict, Iterator

import numpy
import pytest
import steadfast
import steps
from closure_workers import HERE, START_SECONDS, Cluster, free_port, until

OUTCOMES = ("returned", "failed", "cancelled")
STATES = ("connected", "unreachable", "stopped")
EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "python" / "coordinator.py"


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()


@pytest.fixture
def etcd(cluster) -> str:
    """An etcd; returns its endpoint."""
    address = f"127.0.0.1:{free_port()}"
    process = cluster.run(["steadfast", "etcd", "--listen", address, "--data-dir", str(cluster.logs / "etcd")], "etcd")

    def answers() -> bool:
        assert process.code() is None, process.output()
        with contextlib.suppress(OSError), socket.create_connection(address.split(":")):
            return True
        return False

    until(answers)
    return f"http://{address}"


def lines(path) -> list:
    return path.read_text().splitlines() if path.exists() else []


def test_values_are_the_same_after_both_ways(cluster):
    values = [
        None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(10**40), 0.1, math.inf, "", "text\u2603", b"", b"\x00\xff",
        [], [1, [2, [3]]], (), (1, "a"), {}, {"a": 1, 2: [3], (4, 5): {"b": None}},
    ]  # fmt: skip
    with steadfast.Coordinator([cluster.start()]) as coordinator:
        returned = coordinator.fetch([coordinator.schedule(steps.same, (value,)) for value in values])
        assert returned == values
        assert [type(value) for value in returned] == [type(value) for value in values]
        assert math.isnan(coordinator.schedule(steps.same, (math.nan,)).fetch())


def test_arrays_are_the_same_after_both_ways(cluster):
    arrays = [
        numpy.arange(6, dtype="int32").reshape(2, 3), numpy.array([0.1, -0.0], dtype="float16"), numpy.array(True),
        numpy.array([1 + 2j]), numpy.zeros((0, 3)), numpy.array(["a", "bc"]), numpy.arange(4)[::2],
        numpy.array([[1, 2], [3, 4]], order="F"), numpy.array(["2026-11-29"], dtype="datetime64[D]"), numpy.array([1], dtype=">i4"),
    ]  # fmt: skip
    with steadfast.Coordinator([cluster.start()]) as coordinator:
        for array in arrays:
            returned = coordinator.schedule(steps.same, (array,)).fetch()
            assert (returned.dtype, returned.shape) == (array.dtype, array.shape)
            numpy.testing.assert_array_equal(returned, array)
        returned = coordinator.schedule(steps.same, (arrays[0],)).fetch()
        returned += 1
        number = coordinator.schedule(steps.same, (numpy.float32(1.5),)).fetch()
        assert (type(number), number) == (numpy.float32, 1.5)


def test_what_does_not_travel_is_an_error_that_names_its_type(cluster):
    deep = []
    for _ in range(100):
        deep = [deep]
    with steadfast.Coordinator([cluster.start()], on_error="continue") as coordinator:
        for value, error in [
            (object(), "`object` does not travel"), ([{1, 2}], "`set` does not travel"),
            (numpy.array([object()]), "arrays of type `object` do not travel"),
        ]:  # fmt: skip
            with pytest.raises(TypeError, match=error):
                coordinator.schedule(steps.same, (value,))
        with pytest.raises(ValueError, match="nested more than"):
            coordinator.schedule(steps.same, (deep,))
        with pytest.raises(steadfast.SteadfastError, match="at most"):
            coordinator.schedule(steps.same, (numpy.zeros(1 << 21),))
        with pytest.raises(steadfast.ClosureError, match="TypeError: a value of type `object` does not travel"):
            coordinator.schedule(steps.object_of_a_class).fetch()
        with pytest.raises(steadfast.ClosureError, match="ValueError: the result has"):
            coordinator.schedule(steps.large, (9_000_000,)).fetch()
        assert len(coordinator.schedule(steps.large, (8_000_000,)).fetch()) == 8_000_000


def test_only_functions_that_a_worker_finds_are_scheduled(cluster, tmp_path):
    def inner():
        pass

    with steadfast.Coordinator([cluster.start()], on_error="continue") as coordinator:
        assert coordinator.schedule(steps.Steps.double, (4,)).fetch() == 8
        for function, error in [
            (lambda: 1, "has no name by which a worker finds it"), (inner, "has no name by which a worker finds it"),
            (3, "a int has no name"), (steps.Steps.of_class, "no method"), (steps.Steps, "no method"),
        ]:  # fmt: skip
            with pytest.raises(steadfast.InvalidError, match=error):
                coordinator.schedule(function)
        with pytest.raises(steadfast.ClosureError, match="this worker runs functions of steps only; start it with"):
            coordinator.schedule(collections.namedtuple, ("a", "b")).fetch()


def test_a_module_that_coordinates_when_it_is_imported_is_refused(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import steadfast\nsteadfast.Coordinator([])\n")
    done = subprocess.run(
        [sys.executable, "-m", "steadfast.worker", str(program)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert 'below `if __name__ == "__main__":`' in done.stderr
    for module, error in [("no_such", "no module `no_such`"), ("no_such.py", "there is no file no_such.py")]:
        done = subprocess.run(
            [sys.executable, "-m", "steadfast.worker", module], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, error in done.stderr) == (2, True), done.stderr


def test_the_example_of_epochs_runs_as_it_is_written(cluster):
    """S000-1, S000-8, S000-9, S000-10: a worker leaves after the first epoch, another one joins after the second."""
    text = EXAMPLE.read_text()
    program = cluster.logs / "coordinator.py"
    addresses = {f"localhost:{port}": f"127.0.0.1:{free_port()}" for port in (2100, 2101, 2102)}
    for written, used in addresses.items():
        text = text.replace(f'"{written}"', f'"{used}"')
    program.write_text(text)
    for address in addresses.values():
        cluster.start(str(program), address=address)
    process = cluster.run([sys.executable, str(program)], "program")
    assert process.wait() == 0, process.output()
    epochs = process.output().splitlines()
    assert [line.partition(":")[0] for line in epochs] == [f"epoch {number}" for number in range(5)]


def test_a_removed_worker_finishes_what_it_runs_and_returns_under_its_index(cluster):
    """S000-2, S000-3, S000-4, S000-11: nothing is made anew, and the other worker notices nothing."""
    first, second = cluster.start(), cluster.start()
    with steadfast.Coordinator([first, second]) as coordinator:
        dataset = coordinator.create_per_worker_dataset(steps.numbers, (100,))
        numbers = iter(dataset)
        before = [coordinator.schedule(steps.next_of, (numbers,), worker=0).fetch() for _ in range(3)]
        slow = coordinator.schedule(steps.sleeps, (0.5, "slow"), worker=0)
        until(lambda: coordinator.workers[0].closures == 1)
        coordinator.remove_worker(first)
        assert slow.status is steadfast.RemoteValueStatus.READY
        assert [worker.state for worker in coordinator.workers] == ["stopped", "running"]
        places = coordinator.fetch([coordinator.schedule(steps.where) for _ in range(20)])
        assert {index for _, index, _, _ in places} == {1}
        with pytest.raises(steadfast.ClosureCancelled, match="not in use"):
            coordinator.schedule(steps.where, worker=0).fetch()
        assert coordinator.add_worker(first) == 0
        after = coordinator.schedule(steps.next_of, (numbers,), worker=0).fetch()
        assert [number for _, _, number in [*before, after]] == [0, 1, 2, 3]
        assert {process for _, process, _ in [*before, after]} == {cluster[first].pid}
        coordinator.workers[0].stop()
        coordinator.workers[0].restart()
        assert coordinator.schedule(steps.where, worker=first).fetch()[1] == 0


def test_a_worker_that_is_added_has_a_new_index_and_values_of_its_own(cluster):
    """S000-5, S000-7, S000-9: indexes have gaps, and an iterator that was made before has its part on the new worker."""
    addresses = [cluster.start() for _ in range(3)]
    with steadfast.Coordinator(addresses[:2]) as coordinator:
        numbers = iter(coordinator.create_per_worker_dataset(steps.numbers, (10,)))
        coordinator.remove_worker(addresses[1])
        assert coordinator.add_worker(addresses[2]) == 2
        values = coordinator.fetch(coordinator.run_on_each(steps.next_of, (numbers,)))
        assert sorted(values) == [0, 2]
        assert [values[index][0] for index in values] == [0, 2]
        dataset = coordinator.create_per_worker_dataset(steps.numbers, (7,))
        assert set(coordinator.fetch(coordinator.run_on_each(steps.length_of, (dataset,))).values()) == {7}


def test_the_closure_of_a_killed_worker_runs_elsewhere_within_a_third_of_a_second(cluster, tmp_path):
    """S000-12, S000-20: nothing waits for a time to pass; the connection says that the worker is gone."""
    first, second = cluster.start(), cluster.start()
    with steadfast.Coordinator([first, second]) as coordinator:
        until(lambda: all(worker.threads for worker in coordinator.workers))
        delays = []
        for attempt in range(5):
            file = tmp_path / f"attempt-{attempt}"
            value = coordinator.schedule(steps.notes_slowly, (str(file), "begun", 0.6))
            until(lambda file=file: len(lines(file)) == 1)
            busy = next(worker.address for worker in coordinator.workers if worker.closures)
            cluster[busy].kill()
            killed = time.monotonic()
            until(lambda file=file: len(lines(file)) == 2)
            delays.append(time.monotonic() - killed)
            assert value.fetch() == "begun"
            cluster.start(address=busy)
            until(lambda: all(worker.threads for worker in coordinator.workers))
        assert sorted(delays)[2] <= 0.3, delays


def test_ten_thousand_closures_under_kills_have_one_result_each(cluster):
    """S000-12, S000-20."""
    addresses = [cluster.start() for _ in range(3)]
    stop = threading.Event()

    def kills() -> None:
        for number in range(1000):
            if stop.wait(0.4):
                return
            address = addresses[number % 3]
            cluster[address].kill()
            cluster.start(address=address)

    with steadfast.Coordinator(addresses) as coordinator:
        killer = threading.Thread(target=kills)
        killer.start()
        try:
            values = [coordinator.schedule(steps.add, (number, number)) for number in range(10_000)]
            late = [coordinator.schedule(steps.sleeps, (0.01, number)) for number in range(500)]
            coordinator.join(timeout=120)
        finally:
            stop.set()
            killer.join()
        assert coordinator.fetch(values) == [2 * number for number in range(10_000)]
        assert coordinator.fetch(late) == list(range(500))


def test_a_worker_that_hangs_loses_its_closures(cluster):
    """A process that is stopped keeps its connections; pings that it does not answer say that it is gone."""
    first, second = cluster.start(), cluster.start()
    with steadfast.Coordinator([first, second]) as coordinator:
        until(lambda: all(worker.threads for worker in coordinator.workers))
        cluster[first].signal(signal.SIGSTOP)
        values = [coordinator.schedule(steps.add, (number,)) for number in range(20)]
        assert coordinator.fetch(values, timeout=30) == list(range(1, 21))
        cluster[first].signal(signal.SIGCONT)
        until(lambda: all(worker.threads for worker in coordinator.workers))


def test_a_worker_that_is_asked_to_end_finishes_what_it_runs(cluster):
    first, second = cluster.start(), cluster.start()
    with steadfast.Coordinator([first, second]) as coordinator:
        slow = coordinator.schedule(steps.sleeps, (0.7, "slow"), worker=0)
        until(lambda: coordinator.workers[0].closures == 1)
        cluster[first].signal(signal.SIGTERM)
        places = coordinator.fetch([coordinator.schedule(steps.where) for _ in range(10)])
        assert {index for _, index, _, _ in places} == {1}
        assert slow.fetch() == "slow"
        assert cluster[first].wait() == 0
        assert "attempt" not in cluster[first].output()


def test_an_error_is_raised_at_the_next_call_and_cancels_what_waits(cluster):
    """S000-20: as in TensorFlow, but with every error."""
    with steadfast.Coordinator([cluster.start()]) as coordinator:
        bad = coordinator.schedule(steps.fails, ("bad weights",))
        waiting = [coordinator.schedule(steps.sleeps, (0.05,)) for _ in range(50)]
        until(lambda: bad.status is steadfast.RemoteValueStatus.ABORTED)
        with pytest.raises(steadfast.ClosureErrors, match="ValueError: bad weights") as raised:
            coordinator.schedule(steps.add, (1,))
        [error] = raised.value.errors
        assert (error.exception, error.message, error.function) == ("ValueError", "bad weights", "steps:fails")
        assert 'steps.py", line' in error.traceback and "raise ValueError(text)" in str(raised.value)
        assert error.worker == coordinator.workers[0].address
        coordinator.join()
        cancelled = [value for value in waiting if value.status is steadfast.RemoteValueStatus.ABORTED]
        assert 48 <= len(cancelled)
        with pytest.raises(steadfast.ClosureCancelled, match="failed"):
            cancelled[0].fetch()
        with pytest.raises(steadfast.ClosureError, match="bad weights"):
            bad.fetch()
        assert coordinator.schedule(steps.add, (1,)).fetch() == 2
        assert coordinator.done()


def test_every_error_is_reported(cluster):
    with steadfast.Coordinator([cluster.start()], on_error="continue") as coordinator:
        values = [
            coordinator.schedule(steps.fails if number % 2 else steps.same, (str(number),)) for number in range(40)
        ]
        with pytest.raises(steadfast.ClosureErrors, match="20 closures failed") as raised:
            coordinator.join()
        assert sorted(int(error.message) for error in raised.value.errors) == list(range(1, 40, 2))
        assert coordinator.fetch(values[::2]) == [str(number) for number in range(0, 40, 2)]
        coordinator.join()
        with pytest.raises(steadfast.ClosureError, match="SystemExit: no"):
            coordinator.schedule(steps.leaves).fetch()


def test_results_are_arguments_of_other_closures(cluster):
    with steadfast.Coordinator([cluster.start(), cluster.start()], on_error="continue") as coordinator:
        one = coordinator.schedule(steps.sleeps, (0.2, 1))
        two = coordinator.schedule(steps.add, (one, one))
        five = coordinator.schedule(steps.add, kwargs={"left": two, "right": 3})
        lists = coordinator.schedule(steps.same, ({"a": [one, two], "b": five},))
        assert lists.fetch() == {"a": [1, 2], "b": 5}
        failed = coordinator.schedule(steps.fails, ("x",))
        without = coordinator.schedule(steps.add, (failed,))
        with pytest.raises(steadfast.ClosureCancelled, match="whose result is an argument"):
            without.fetch()
        with pytest.raises(steadfast.ClosureError, match="ValueError: x"):
            failed.fetch()


def test_the_end_of_data_is_no_error(cluster):
    with steadfast.Coordinator([cluster.start()]) as coordinator:
        numbers = iter(coordinator.create_per_worker_dataset(steps.numbers, (2,)))
        values = [coordinator.schedule(steps.next_of, (numbers,)) for _ in range(4)]
        coordinator.join()
        assert [value.end_of_data() for value in values] == [False, False, True, True]
        assert values[2].fetch() is None


def test_map_yields_results_in_the_order_of_the_items(cluster):
    addresses = [cluster.start(), cluster.start()]
    with steadfast.Coordinator(addresses) as coordinator:
        taken = []

        def items():
            for number in range(1000):
                taken.append(number)
                yield number

        results = coordinator.map(steps.add, items(), ahead=10)
        assert next(results) == 1
        assert len(taken) == 10
        assert list(results) == list(range(2, 1001))
        assert list(coordinator.map(steps.add, [(1, 2), (3, 4)], on_each=True)) == [3, 7]


def test_schedule_waits_while_too_many_closures_wait(cluster):
    """S000-20: the queue has a bound."""
    coordinator = steadfast.Coordinator([], waiting_max=3)
    values = [coordinator.schedule(steps.add, (number,)) for number in range(3)]
    with pytest.raises(TimeoutError, match="3 closures wait for a worker"):
        coordinator.schedule(steps.add, (3,), timeout=0.2)
    with pytest.raises(TimeoutError, match="there is no worker: add one"):
        coordinator.join(timeout=0.1)
    with pytest.raises(TimeoutError):
        values[0].fetch(timeout=0)
    threading.Timer(0.3, lambda: coordinator.add_worker(cluster.start())).start()
    values.append(coordinator.schedule(steps.add, (3,)))
    assert coordinator.fetch(values) == [1, 2, 3, 4]
    coordinator.close()
    with pytest.raises(steadfast.UnavailableError, match="the coordinator is closed"):
        coordinator.schedule(steps.add, (1,))
    coordinator.close()


def test_a_cancelled_closure_learns_that_it_is_not_wanted(cluster, tmp_path):
    with steadfast.Coordinator([cluster.start()]) as coordinator:
        running = coordinator.schedule(steps.is_wanted_until, (str(tmp_path / "notes"),))
        waiting = coordinator.schedule(steps.add, (1,))
        until(lambda: coordinator.workers[0].closures == 1)
        running.cancel()
        waiting.cancel()
        for value in (running, waiting):
            with pytest.raises(steadfast.ClosureCancelled, match="it was cancelled"):
                value.fetch()
        assert coordinator.schedule(steps.add, (1,)).fetch(timeout=10) == 2
        assert lines(tmp_path / "notes") == ["not wanted"]


def test_a_closure_that_ends_its_workers_fails_after_some_of_them(cluster):
    addresses = [cluster.start(), cluster.start()]
    with steadfast.Coordinator(addresses, worker_losses_max=2, on_error="continue") as coordinator:
        value = coordinator.schedule(steps.dies)
        with pytest.raises(steadfast.WorkerLost, match="2 workers were lost while they ran it"):
            value.fetch(timeout=30)
        cluster.start(address=addresses[0])
        assert coordinator.schedule(steps.add, (1,)).fetch() == 2


def test_a_worker_runs_as_many_closures_at_once_as_it_has_threads(cluster):
    address = cluster.start(str(HERE / "steps.py"), "--threads", "4")
    with steadfast.Coordinator([address]) as coordinator:
        until(lambda: coordinator.workers[0].threads == 4)
        begun = time.monotonic()
        values = [coordinator.schedule(steps.sleeps, (0.5, number)) for number in range(8)]
        assert coordinator.fetch(values) == list(range(8))
        assert 0.9 < time.monotonic() - begun < 3


def test_only_an_administrator_of_the_job_has_functions_run(cluster, tmp_path):
    """F50: with certificates, neither a trainer of the job nor a program without one."""
    certificates = tmp_path / "certs"
    subprocess.run(["steadfast", "certs", "init", "--dir", str(certificates)], check=True, stdout=subprocess.DEVNULL)
    worker = cluster.start(str(HERE / "steps.py"), "--tls", str(certificates / "trainer"))
    with steadfast.Coordinator([worker], args=["--tls", str(certificates / "admin")]) as coordinator:
        assert coordinator.schedule(steps.add, (1,)).fetch(timeout=30) == 2
    for args in (["--tls", str(certificates / "trainer")], []):
        coordinator = steadfast.Coordinator([worker], args=args)
        value = coordinator.schedule(steps.notes, (str(tmp_path / "notes"), "ran"))
        until(lambda refused=coordinator: "answered" not in refused.workers[0].reason)
        if args:
            assert "Attend is not permitted for trainer" in coordinator.workers[0].reason
        assert value.status is steadfast.RemoteValueStatus.NOT_READY
        coordinator.close()
    assert lines(tmp_path / "notes") == []


def test_steadfast_worker_is_a_worker(cluster):
    address = f"127.0.0.1:{free_port()}"
    command = [
        "steadfast",
        "worker",
        "--python",
        sys.executable,
        str(HERE / "steps.py"),
        "--listen",
        address,
        "--threads",
        "2",
    ]
    process = cluster.run(command, "worker")
    with steadfast.Coordinator([address]) as coordinator:
        assert coordinator.schedule(steps.where).fetch()[0] == process.pid
        assert coordinator.workers[0].threads == 2
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_a_worker_need_not_listen_when_it_is_added(cluster):
    address = f"127.0.0.1:{free_port()}"
    with steadfast.Coordinator([address]) as coordinator:
        value = coordinator.schedule(steps.add, (1,))
        until(lambda: "answered" not in coordinator.workers[0].reason)
        assert coordinator.workers[0].threads == 0
        with pytest.raises(TimeoutError, match=f"no connection to {address}"):
            coordinator.join(timeout=0.2)
        cluster.start(address=address)
        assert value.fetch() == 2
        for wrong in ["localhost", "http://localhost:1", "localhost:x", ":1"]:
            with pytest.raises(steadfast.InvalidError, match="is not the address of a worker"):
                coordinator.add_worker(wrong)
        with pytest.raises(steadfast.NotFoundError, match="no worker `other:1` was added"):
            coordinator.remove_worker("other:1")


def test_a_slow_worker_that_is_removed_gives_back_after_a_time(cluster):
    """S000-12: what it has not finished runs elsewhere, and its late reply does not count."""
    first, second = cluster.start(), cluster.start()
    with steadfast.Coordinator([first]) as coordinator:
        value = coordinator.schedule(steps.sleeps, (2, "slow"))
        until(lambda: coordinator.workers[0].closures == 1)
        coordinator.add_worker(second)
        coordinator.remove_worker(first, timeout=0.2)
        assert value.status is steadfast.RemoteValueStatus.NOT_READY
        assert value.fetch() == "slow"
        assert coordinator.workers[1].finished == 1


PROGRAM = """
import os, sys
import steadfast, steps
endpoint, notes, count, die_at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with steadfast.Coordinator(sys.argv[5:], job="named", endpoints=endpoint, args=["--lease-ttl", "2s"]) as coordinator:
    total = 0
    for epoch in range(count):
        values = [
            coordinator.schedule(steps.notes, (notes, f"{epoch}-{number}"), name=f"{epoch}-{number}") for number in range(10)
        ]
        coordinator.join()
        total += len(coordinator.fetch(values))
        if epoch == die_at:
            os.kill(os.getpid(), 9)
    print("total", total)
"""


def test_a_coordinator_that_was_killed_runs_no_finished_closure_again(cluster, etcd, tmp_path):
    """S000-20: the results of closures with a name outlive the program."""
    program = tmp_path / "named.py"
    program.write_text(PROGRAM)
    notes = tmp_path / "notes"
    workers = [cluster.start(), cluster.start()]
    environment = {"PYTHONPATH": str(HERE)}
    for number, die_at in enumerate((3, 7, -1)):
        command = [sys.executable, str(program), etcd, str(notes), "10", str(die_at), *workers]
        process = cluster.run(command, f"program-{number}", environment)
        code = process.wait()
        assert code == (-signal.SIGKILL if 0 <= die_at else 0), process.output()
    assert "total 100" in process.output()
    counts = collections.Counter(lines(notes))
    assert counts == {f"{epoch}-{number}": 1 for epoch in range(10) for number in range(10)}
    # The results are there until they are forgotten.
    with steadfast.Coordinator(workers, job="named", endpoints=etcd) as coordinator:
        assert coordinator.schedule(steps.notes, (str(notes), "3-3"), name="3-3").fetch() == "3-3"
        with pytest.raises(steadfast.ClosureError, match="the name `3-3` belongs to another call"):
            coordinator.schedule(steps.notes, (str(notes), "other"), name="3-3").fetch()
        with pytest.raises(steadfast.InvalidError, match="`a/b` is not a valid closure name"):
            coordinator.schedule(steps.add, (1,), name="a/b")
        finishing = [coordinator.schedule(steps.same, (number,), name=f"f{number}") for number in range(50)]
        coordinator.forget_results()
        assert coordinator.fetch(finishing, timeout=30) == list(range(50))
        assert coordinator.schedule(steps.notes, (str(notes), "3-3"), name="3-3").fetch() == "3-3"
    assert collections.Counter(lines(notes))["3-3"] == 2


def test_a_job_has_one_coordinator(cluster, etcd):
    with steadfast.Coordinator([], job="one", endpoints=etcd):
        began = time.monotonic()
        with pytest.raises(steadfast.ConflictError, match="another coordinator runs this job"):
            steadfast.Coordinator([], job="one", endpoints=etcd, args=["--lease-ttl", "1s"])
        assert time.monotonic() - began < 30
    steadfast.Coordinator([], job="one", endpoints=etcd).close()


def test_a_coordinator_that_was_away_for_too_long_changes_nothing(cluster, etcd, tmp_path):
    """A program that is stopped loses its lock to another one. When it goes on, what it does has no effect."""
    program = tmp_path / "zombie.py"
    program.write_text(
        "import sys, time\n"
        "import steadfast, steps\n"
        "coordinator = steadfast.Coordinator(sys.argv[2:], job='z', endpoints=sys.argv[1], args=['--lease-ttl', '2s'])\n"
        "print('begun', flush=True)\n"
        "while True:\n"
        "    time.sleep(0.1)\n"
        "    coordinator.schedule(steps.same, ('old',), name='a').fetch()\n"
    )
    worker = cluster.start()
    process = cluster.run([sys.executable, str(program), etcd], "zombie", {"PYTHONPATH": str(HERE)})
    until(lambda: "begun" in process.output())
    process.signal(signal.SIGSTOP)
    with steadfast.Coordinator([worker], job="z", endpoints=etcd) as coordinator:
        assert coordinator.schedule(steps.same, ("new",), name="a").fetch() == "new"
        process.signal(signal.SIGCONT)
        assert process.wait() != 0
        assert "another coordinator runs this job" in process.output(), process.output()
        assert coordinator.schedule(steps.same, ("new",), name="a").fetch() == "new"


def test_ctrl_c_ends_a_wait_at_once(cluster, tmp_path):
    program = tmp_path / "waits.py"
    program.write_text(
        "import steadfast, steps\n"
        "coordinator = steadfast.Coordinator([])\n"
        "value = coordinator.schedule(steps.add, (1,))\n"
        "print('waits', flush=True)\n"
        "value.fetch()\n"
    )
    process = cluster.run([sys.executable, str(program)], "waits", {"PYTHONPATH": str(HERE)})
    until(lambda: "waits" in process.output())
    process.signal(signal.SIGINT)
    assert process.wait(10) == -signal.SIGINT
    assert "KeyboardInterrupt" in process.output()


def test_a_coordinator_finds_the_workers_of_its_job(cluster, etcd):
    """S000-8: the platform starts and ends workers, without a word to the coordinator."""
    found = ["--job", "found", "--etcd-endpoints", etcd, "--lease-ttl", "1s"]

    def start() -> str:
        return cluster.start(str(HERE / "steps.py"), *found)

    def running(coordinator) -> set:
        return {it.address for it in coordinator.workers if it.state == "running" and it.threads}

    first = start()
    with steadfast.Coordinator(job="found", endpoints=etcd) as coordinator:
        assert coordinator.schedule(steps.add, (1,)).fetch(timeout=START_SECONDS) == 2
        second = start()
        until(lambda: running(coordinator) == {first, second})
        # One ends as its platform asks it to, the other one is killed.
        cluster[first].signal(signal.SIGTERM)
        assert cluster[first].wait() == 0
        until(lambda: running(coordinator) == {second})
        assert coordinator.schedule(steps.add, (2,)).fetch(timeout=START_SECONDS) == 3
        third = start()
        cluster[second].kill()
        assert coordinator.schedule(steps.add, (3,)).fetch(timeout=START_SECONDS) == 4
        until(lambda: running(coordinator) == {third})
        states = {it.address: it.state for it in coordinator.workers}
        until(lambda: {it.address: it.state for it in coordinator.workers}[second] == "stopped")
        assert set(states) == {first, second, third}
    # Workers that are given are all.
    with steadfast.Coordinator([], job="found", endpoints=etcd) as coordinator:
        assert coordinator.workers == []


def test_an_etcd_that_is_away_delays_only_closures_with_a_name(cluster, tmp_path, caplog):
    """A coordinator rides through an outage of etcd that is longer than its lease."""
    address = f"127.0.0.1:{free_port()}"
    command = ["steadfast", "etcd", "--listen", address, "--data-dir", str(tmp_path / "etcd")]
    server = cluster.run(command, "etcd")
    until(lambda: "listens" in server.output() or "serv" in server.output())
    with steadfast.Coordinator(
        [cluster.start()], job="away", endpoints=address, args=["--lease-ttl", "2s"]
    ) as coordinator:
        assert coordinator.schedule(steps.add, (1,), name="before").fetch() == 2
        server.kill()
        values = [coordinator.schedule(steps.add, (number,)) for number in range(10)]
        named = coordinator.schedule(steps.add, (10,), name="during")
        until(lambda: "acquires its lock again" in caplog.text)
        cluster.run(command, "etcd-again")
        assert coordinator.fetch(values) == list(range(1, 11))
        assert named.fetch(timeout=60) == 11
        assert coordinator.schedule(steps.add, (1,), name="before").fetch() == 2


def test_metrics_count_closures_and_workers(cluster):
    """S003-54: what became of closures, runs that were repeated, and workers without a connection are metrics."""
    admin = f"127.0.0.1:{free_port()}"
    kept, lost = cluster.start(), cluster.start()

    def metrics(address: str) -> Dict[str, float]:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=START_SECONDS) as answer:
            rows = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in rows}

    with steadfast.Coordinator([kept, lost], on_error="continue", args=["--admin-listen", admin]) as coordinator:
        until(lambda: all(worker.threads for worker in coordinator.workers))
        assert coordinator.fetch(coordinator.schedule(steps.add, (1,))) == 2
        with pytest.raises(steadfast.ClosureError):
            coordinator.schedule(steps.fails, ("no",)).fetch()
        slow = coordinator.schedule(steps.sleeps, (START_SECONDS,), worker=1)
        until(lambda: coordinator.workers[1].closures == 1)
        assert metrics(admin)["steadfast_coordinator_running"] == 1
        slow.cancel()
        cluster[lost].kill()
        until(lambda: not coordinator.workers[1].threads)
        counted = metrics(admin)
        outcomes = {it: counted[f'steadfast_coordinator_closures_total{{outcome="{it}"}}'] for it in OUTCOMES}
        assert outcomes == {"returned": 1, "failed": 1, "cancelled": 1}
        assert counted["steadfast_coordinator_runs_total"] == 3
        states = {it: counted[f'steadfast_coordinator_workers{{state="{it}"}}'] for it in STATES}
        assert states == {"connected": 1, "unreachable": 1, "stopped": 0}
        [port] = re.findall(r"admin port: ([^)]*)", cluster[kept].output())
        assert 1 <= metrics(port)["steadfast_worker_closures_total"] <= 2
        drain = urllib.request.Request(f"http://{admin}/drain", method="POST")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(drain, timeout=START_SECONDS)
    with pytest.raises(urllib.error.URLError):
        metrics(admin)


def test_only_functions_that_a_module_defines_can_be_called(cluster):
    """A worker refuses functions that its modules have imported, also to a client that bypasses the package."""
    with steadfast.Coordinator([cluster.start()], on_error="continue") as coordinator:
        for name in ["steps:os.system", "steps:time.sleep", "steps:add.__globals__.get", "steps:Steps", "os:system"]:
            value = steadfast.RemoteValue(coordinator._native.schedule(name, ("true",), None))
            with pytest.raises(steadfast.ClosureError, match="defines no function|runs functions of steps only"):
                value.fetch()


def test_results_that_fill_many_answers_of_etcd_are_found_again(cluster, etcd):
    """S000-20: of all sizes that a result may have."""
    worker = cluster.start()
    sizes = [1_000_000, 10, 900_000, 1_000_000, 5_000, 1_000_000, 1_000_000, 0]
    for _ in range(2):
        with steadfast.Coordinator([worker], job="large", endpoints=etcd) as coordinator:
            values = [coordinator.schedule(steps.large, (size,), name=str(at)) for at, size in enumerate(sizes)]
            assert [len(value) for value in coordinator.fetch(values, timeout=30)] == sizes
        # Nothing else is asked for them.
        cluster[worker].kill()


def test_what_belongs_to_another_coordinator_is_refused(cluster):
    worker = cluster.start()
    with steadfast.Coordinator([worker]) as first, steadfast.Coordinator([worker]) as second:
        value = first.schedule(steps.add, (1,))
        numbers = iter(first.create_per_worker_dataset(steps.numbers, (3,)))
        for foreign in (value, [value], numbers):
            with pytest.raises(steadfast.InvalidError, match="belongs to another coordinator"):
                second.schedule(steps.same, (foreign,))


def test_a_name_tells_the_results_among_its_arguments_apart(cluster):
    with steadfast.Coordinator([cluster.start()]) as coordinator:
        one, two = (coordinator.schedule(steps.add, (number, 0)) for number in (1, 2))
        assert coordinator.schedule(steps.add, (one,), name="x").fetch() == 2
        with pytest.raises(steadfast.ClosureError, match="the name `x` belongs to another call"):
            coordinator.schedule(steps.add, (two,), name="x").fetch()
        # Values of workers are made anew in each program.
        for _ in range(2):
            dataset = coordinator.create_per_worker_dataset(steps.numbers, (3,))
            assert coordinator.schedule(steps.length_of, (dataset,), name="y").fetch() == 3


def test_an_exception_of_any_kind_leaves_the_worker_as_it_was(cluster):
    with steadfast.Coordinator([cluster.start()], on_error="continue") as coordinator:
        for kind, error in [
            ("no text", "Silent: .its text cannot be shown"), ("surrogate", r"ValueError: \\udcff"),
            ("long", "characters"), ("interrupt", "KeyboardInterrupt"), ("exit", "GeneratorExit"),
        ]:  # fmt: skip
            with pytest.raises(steadfast.ClosureError, match=error) as raised:
                coordinator.schedule(steps.fails_with, (kind,)).fetch(timeout=10)
            assert len(str(raised.value)) < 300_000
        assert coordinator.schedule(steps.fails_with, ("out of range",)).end_of_data()
        assert coordinator.schedule(steps.where).fetch()[3] == 7
        # Those that `fetch` has raised are not raised again.
        coordinator.join()


def test_what_runs_goes_on_while_etcd_is_away(cluster, tmp_path, caplog):
    """A closure that takes longer than the lease of its coordinator is not begun again when etcd was away."""
    address, notes = f"127.0.0.1:{free_port()}", tmp_path / "notes"
    command = ["steadfast", "etcd", "--listen", address, "--data-dir", str(tmp_path / "etcd")]
    server = cluster.run(command, "etcd")
    until(lambda: "serv" in server.output())
    with steadfast.Coordinator(
        [cluster.start()], job="away", endpoints=address, args=["--lease-ttl", "2s"]
    ) as coordinator:
        value = coordinator.schedule(steps.notes_slowly, (str(notes), "begun", 7), name="slow")
        until(lambda: len(lines(notes)) == 1)
        server.kill()
        until(lambda: "acquires its lock again" in caplog.text)
        cluster.run(command, "etcd-again")
        assert value.fetch(timeout=60) == "begun"
        assert lines(notes) == ["begun"]


def test_arguments_that_are_too_large_together_are_no_loss_of_workers(cluster):
    with steadfast.Coordinator([cluster.start()]) as coordinator:
        large = [coordinator.schedule(steps.large, (5_000_000,)) for _ in range(2)]
        with pytest.raises(steadfast.ClosureError, match="bytes together with the results among them"):
            coordinator.schedule(steps.same, (large,)).fetch(timeout=30)


def test_a_coordinator_that_is_closed_frees_its_workers_and_ends_all_waits(cluster):
    worker = cluster.start()
    with pytest.raises(ZeroDivisionError), steadfast.Coordinator([worker]) as coordinator:
        running = coordinator.schedule(steps.is_wanted_until, (str(cluster.logs / "notes"),))
        until(lambda: coordinator.workers[0].closures == 1)
        raise ZeroDivisionError
    assert running.status is steadfast.RemoteValueStatus.ABORTED
    with pytest.raises(steadfast.ClosureCancelled, match="the coordinator was closed"):
        running.fetch()
    with pytest.raises(steadfast.UnavailableError, match="closed"):
        coordinator.remove_worker(worker)
    with pytest.raises(steadfast.UnavailableError, match="closed"):
        coordinator.add_worker("127.0.0.1:1")
    with steadfast.Coordinator([worker]) as second:
        assert second.schedule(steps.add, (1,)).fetch(timeout=10) == 2


def test_a_forked_process_ends_and_is_told(cluster, tmp_path):
    program = tmp_path / "forks.py"
    program.write_text(
        "import os, sys\n"
        "import steadfast, steps\n"
        "coordinator = steadfast.Coordinator(sys.argv[1:])\n"
        "value = coordinator.schedule(steps.add, (1,))\n"
        "assert value.fetch() == 2\n"
        "for call in (coordinator.join, value.fetch, coordinator.forget_results, coordinator.close, lambda: None):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        try:\n"
        "            call()\n"
        "        except steadfast.ForkedError as error:\n"
        "            print(error)\n"
        "        del value, coordinator, call\n"
        "        sys.exit(7)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        "assert coordinator.schedule(steps.add, (2,)).fetch() == 3\n"
    )
    process = cluster.run([sys.executable, str(program), cluster.start()], "forks", {"PYTHONPATH": str(HERE)})
    assert process.wait(30) == 0, process.output()
    assert process.output().count("7\n") == 5
    assert process.output().count("this process was forked from the one that has connected") == 3


def test_a_worker_drops_what_no_closure_needs(cluster, tmp_path):
    notes = tmp_path / "notes"
    with steadfast.Coordinator([cluster.start()]) as coordinator:
        value = iter(coordinator.create_per_worker_dataset(steps.noted_dataset, (str(notes),)))
        assert coordinator.schedule(steps.next_of, (value,)).fetch() == 0
        again = coordinator.schedule(steps.sleeps, (0.3, 1))
        late = coordinator.schedule(steps.after, (again, value))
        del value
        assert late.fetch() == 1
        until(lambda: lines(notes) == ["dropped"])


def test_arrays_that_would_change_on_their_way_are_refused(cluster):
    types = pytest.importorskip("ml_dtypes")
    with steadfast.Coordinator([]) as coordinator:
        with pytest.raises(TypeError, match="arrays of type `bfloat16` do not travel"):
            coordinator.schedule(steps.same, (numpy.zeros(3, dtype=types.bfloat16),))
        with pytest.raises(TypeError, match="masked arrays do not travel"):
            coordinator.schedule(steps.same, (numpy.ma.masked_array([1, 2], [True, False]),))
        with pytest.raises(steadfast.InvalidError, match="`args` is a str"):
            coordinator.schedule(steps.same, "abc")


def test_threads_of_a_worker_share_an_iterator(cluster):
    address = cluster.start(str(HERE / "steps.py"), "--threads", "4")
    with steadfast.Coordinator([address]) as coordinator:
        numbers = iter(coordinator.create_per_worker_dataset(steps.generated, (100,)))
        values = coordinator.fetch([coordinator.schedule(steps.next_of, (numbers,)) for _ in range(100)])
        assert sorted(values) == list(range(100))


def test_functions_of_tensorflow_and_torch_are_found_by_their_names(cluster, tmp_path):
    torch = pytest.importorskip("torch")
    program = tmp_path / "tensors.py"
    program.write_text("import torch\n@torch.no_grad()\ndef double(tensor):\n    return 2 * torch.as_tensor(tensor)\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import tensors
    finally:
        sys.path.remove(str(tmp_path))
    with steadfast.Coordinator([cluster.start(str(program))]) as coordinator:
        doubled = coordinator.schedule(tensors.double, (torch.arange(3),)).fetch()
        assert doubled.tolist() == [0, 2, 4]
