"""The same bits for any number of workers that train with a loop of their own."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any, Dict, List

import pytest
import steadfast
from nodes import PROGRAM, Nodes, Process
from steadfast.elastic.accumulation import own_lanes

torch = pytest.importorskip("torch")
sums = pytest.importorskip("steadfast.elastic._lane_sums")
et = pytest.importorskip("steadfast.elastic.torch")

TRAIN = pathlib.Path(__file__).parent / "programs" / "fixed_order.py"
UPDATES = 36

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.xdist_group("fixed_order")]


def results(text: str) -> Dict[str, str]:
    found = re.findall(r"result (\w+) (\w+)", text)
    assert found, text
    for name in dict(found):
        assert len({digest for it, digest in found if it == name}) == 1, text
    return dict(found)


def run(workers: int, directory: pathlib.Path) -> Dict[str, str]:
    """Trains all models with some workers; returns the SHA-256 of each."""
    program = [sys.executable, str(TRAIN), str(UPDATES), str(directory)]
    command = [PROGRAM, "run", "--standalone", "--nproc-per-node", str(workers), "--", *program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=directory)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return results(ran.stdout + ran.stderr)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: Any) -> Dict[str, str]:
    return run(1, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("workers", [2, 3, 4, 7])
def test_models_have_the_same_bits_for_any_number_of_workers(workers, tmp_path, expected):
    """S002-8: dropout, BatchNorm, tied weights, an LSTM; frozen, unused and seldom used parameters; clipping, groups,
    a schedule, bfloat16, and batches in parts."""
    assert run(workers, tmp_path) == expected


def test_models_have_the_same_bits_after_kills_joins_and_leaves(tmp_path, expected):
    """S002-8, S003-50"""
    (tmp_path / "stops").touch()
    with Nodes(1, 4, tmp_path) as nodes:
        command = [sys.executable, str(TRAIN), str(UPDATES), str(tmp_path)]
        each: List[Process] = [nodes.add(command, "--max-restarts", "9") for _ in range(2)]

        def text() -> str:
            return "".join(it.log.read_text() for it in each)

        def until(update: int) -> None:
            nodes.until(lambda: f"update {update}\n" in each[0].log.read_text(), f"update {update}")

        def go(update: int) -> None:
            (tmp_path / f"go-{update}").touch()

        until(10)
        each.append(nodes.add(command, "--max-restarts", "9"))
        nodes.until(lambda: nodes.status().get("waiting") == 1 or "begin" in each[2].log.read_text(), "a third node")
        go(10)
        until(20)
        os.kill(workers_of(each[1])[0], signal.SIGKILL)
        go(20)
        until(30)
        nodes.kill(each[2])
        go(30)
        nodes.wait()
        assert set(re.findall(r"begin \d+ of (\d)", text())) == {"2", "3"}
        assert results(text()) == expected


def test_models_have_the_same_bits_for_any_sequence_of_numbers_of_workers(tmp_path, expected):
    """S002-10: an operator gives a job fewer workers and more again; nodes that have to wait end with the job."""
    (tmp_path / "stops").touch()
    with Nodes(1, 3, tmp_path) as nodes:
        command = [sys.executable, str(TRAIN), str(UPDATES), str(tmp_path)]
        each = [nodes.add(command) for _ in range(3)]

        def text() -> str:
            return "".join(it.log.read_text() for it in each)

        def until(update: int) -> None:
            nodes.until(lambda: f"update {update}\n" in text(), f"update {update}")

        for update, workers in [(10, 1), (20, "all"), (30, 2)]:
            until(update)
            nodes.scale(workers)
            (tmp_path / f"go-{update}").touch()
        nodes.wait()
        assert {"1", "2", "3"} <= set(re.findall(r"begin \d+ of (\d)", text()))
        assert results(text()) == expected


def workers_of(node: Process) -> List[int]:
    """The processes of a node's worker: those that Python runs."""
    commands = {pid: pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid in node.pids()}
    return sorted(pid for pid, command in commands.items() if command.startswith(sys.executable.encode()))


def shape(node: Any) -> Any:
    if node.end - node.first == 1:
        return node.first
    left, right = node.halves()
    return [shape(left), shape(right)]


def test_lanes_are_added_along_the_tree_of_rfc_6962():
    assert shape(sums.Node(0, 7)) == [[[0, 1], [2, 3]], [[4, 5], 6]]
    assert sums.cover(8, range(3, 6)) == [(3, 4), (4, 6)]
    assert sums.cover(6, range(0, 6)) == [(0, 6)]


@pytest.mark.parametrize("lanes", range(1, 14))
def test_workers_hold_the_nodes_of_their_covers_and_their_sum_is_that_of_the_tree(lanes):
    """S002-8: also of lanes that are no power of two, and without a gradient."""
    generator = torch.Generator().manual_seed(lanes)
    values = [torch.randn(5, generator=generator) * 10.0**place for place in range(lanes)]
    gradients = [None if number % 5 == 3 else value for number, value in enumerate(values)]

    def of(node: Any) -> Any:
        if node.end - node.first == 1:
            return torch.zeros(5) if gradients[node.first] is None else gradients[node.first]
        left, right = node.halves()
        return of(left) + of(right)

    for workers in range(1, lanes + 1):
        held: Dict[Any, Any] = {}
        dealt = [own_lanes(rank, workers, lanes) for rank in range(workers)]
        assert list(itertools.chain(*dealt)) == list(range(lanes))
        for own in dealt:
            some = sums.LaneSums(lanes)
            for lane in own:
                value = gradients[lane]
                some.add(lane, [None if value is None else value.clone()])
            cover = sums.cover(lanes, own)
            assert len(some.sums()) == len(cover)
            held.update((node, torch.zeros(5) if it is None else it) for node, (it,) in zip(cover, some.sums()))
        assert torch.equal(sums._folded(sums.Node(0, lanes), held), of(sums.Node(0, lanes)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "sorted", "lanes": 2}, '`order` is "sorted"'),
        ({"order": "fixed"}, "needs `lanes`"),
        ({"order": "fixed", "lanes": 2}, "and `model`"),
    ],
)
def test_settings_without_which_bits_would_differ_are_refused(settings, message):
    parameter = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(steadfast.InvalidError, match=message):
        et.GradientAccumulator(torch.optim.SGD([parameter], lr=1.0), **settings)


def test_a_batch_has_its_random_states_whatever_was_drawn_before_and_whatever_follows():
    model = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.Dropout(0.5))
    drawn: List[Any] = []
    model.register_forward_hook(lambda _, __, output: drawn.append(output.detach() == 0))
    for disturbs in (False, True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        accumulator = et.GradientAccumulator(optimizer, lanes=2, order="fixed", model=model)
        for _ in range(4):
            if disturbs:
                torch.rand(7)
                with torch.no_grad():
                    model.eval()(torch.ones(2, 3))
                    drawn.pop()
                model.train()
            accumulator.backward(model(torch.ones(2, 3)).sum(), 2)
            accumulator.step()
    first, second = drawn[:4], drawn[4:]
    assert all(map(torch.equal, first, second))
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(first, 2))


def test_the_number_of_updates_is_part_of_the_state():
    """Random states go on where they were."""
    model = torch.nn.Linear(2, 1)
    make = lambda: et.GradientAccumulator(  # noqa: E731
        torch.optim.SGD(model.parameters(), lr=0.0), lanes=1, order="fixed", model=model
    )
    first, second = make(), make()
    for _ in range(3):
        first.backward(model(torch.ones(1, 2)).sum(), 1)
        first.step()
    state = first.state_dict()
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert state["updates"] == 3
    with pytest.raises(steadfast.InvalidError, match=r"call `torch.set_num_threads\(77\)`"):
        second.load_state_dict({**state, "threads": 77})
    with pytest.raises(steadfast.InvalidError, match="pass `seed=99`"):
        second.load_state_dict({**state, "seed": 99})
    # The state of one that adds in any order.
    second.load_state_dict({"lanes": 1, "scaler": None})
    assert second.state_dict()["updates"] == 0
