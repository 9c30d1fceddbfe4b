"""An optimizer that adds the gradients of all workers, for loops that call `backward` and `step` themselves."""

from __future__ import annotations

import copy
import pathlib
import subprocess
import sys
from typing import Any, Dict, Iterator

import pytest
import steadfast
from nodes import PROGRAM

torch = pytest.importorskip("torch")
et = pytest.importorskip("steadfast.elastic.torch")

TRAIN = pathlib.Path(__file__).parent / "programs" / "distributed_optimizer.py"

pytestmark = pytest.mark.usefixtures("alone")


def net_and_optimizer() -> Any:
    torch.manual_seed(3)
    net = torch.nn.Linear(4, 2)
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def passes(number: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(4)
    for count in range(number):
        yield torch.randn(1 + count % 3, 4, generator=generator)


def test_the_bits_are_the_same_for_any_number_of_workers(tmp_path):
    """S002-8: also for numbers that do not divide the passes of an update."""
    found: Dict[int, str] = {}
    for workers in (1, 2, 4):
        command = [PROGRAM, "run", "--standalone", "--nproc-per-node", str(workers), "--", sys.executable, str(TRAIN)]
        ran = subprocess.run([*command, "20"], capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        results = {line.partition("result ")[2] for line in ran.stdout.splitlines() if "result " in line}
        (found[workers],) = results
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("sets_to_none", [True, False])
def test_an_update_is_the_mean_over_the_samples_of_its_passes(sets_to_none):
    """S002-8: whatever `zero_grad` does between the passes."""
    net, optimizer = net_and_optimizer()
    other, plain = net_and_optimizer()
    distributed = et.DistributedOptimizer(optimizer, fixed_global_batch_size=True, lanes=3)
    updated = []
    for x in passes(6):
        distributed.zero_grad(set_to_none=sets_to_none)
        net(x).pow(2).sum(1).mean().backward()
        distributed.step(samples=len(x))
        updated.append(distributed.update_gradients)
    assert updated == [False, False, True] * 2
    inputs = list(passes(6))
    for update in (inputs[:3], inputs[3:]):
        plain.zero_grad()
        other(torch.cat(update)).pow(2).sum(1).mean().backward()
        plain.step()
    torch.testing.assert_close(net.state_dict(), other.state_dict())


def test_the_example_of_a_fixed_batch_takes_as_many_passes_as_there_can_be_workers(monkeypatch):
    """S002-8: the variable that agents set."""
    monkeypatch.setenv("MAX_WORKER_NUM", "4")
    net, optimizer = net_and_optimizer()
    optimizer = et.DistributedOptimizer(optimizer, fixed_global_batch_size=True)
    before = copy.deepcopy(net.state_dict())
    for count, x in enumerate(passes(4)):
        assert all(map(torch.equal, net.state_dict().values(), before.values())), count
        net(x).sum().backward()
        optimizer.step()
    assert not torch.equal(net.weight, before["weight"])


def test_it_is_an_optimizer_of_the_same_class_for_schedules_hooks_and_closures():
    net, optimizer = net_and_optimizer()
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    distributed = et.DistributedOptimizer(optimizer)
    assert isinstance(distributed, torch.optim.SGD)
    assert type(distributed).__name__ == "SGD"
    calls = []
    distributed.register_step_post_hook(lambda *_: calls.append("step"))
    late = torch.optim.lr_scheduler.ExponentialLR(distributed, 0.5)

    def closure() -> Any:
        distributed.zero_grad()
        loss = net(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    before = net.weight.detach().clone()
    expected = net(torch.ones(2, 4)).sum()
    assert distributed.step(closure) == expected
    assert calls == ["step"]
    assert not torch.equal(net.weight, before)
    early.step()
    late.step()
    assert distributed.param_groups[0]["lr"] == pytest.approx(0.025)


def test_its_state_goes_on_and_also_that_of_an_optimizer_that_was_not_wrapped():
    def make() -> Any:
        net, optimizer = net_and_optimizer()
        return net, et.DistributedOptimizer(optimizer, fixed_global_batch_size=True, lanes=1)

    def update(net: Any, optimizer: Any) -> None:
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    net, optimizer = make()
    for _ in range(3):
        update(net, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["steadfast"]["updates"] == 3
    again, resumed = make()
    again.load_state_dict(net.state_dict())
    resumed.load_state_dict(saved)
    for each in ((net, optimizer), (again, resumed)):
        update(*each)
    assert all(map(torch.equal, net.state_dict().values(), again.state_dict().values()))
    plain = net_and_optimizer()[1]
    resumed.load_state_dict(plain.state_dict())
    plain.load_state_dict(saved)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fixed_global_batch_size": True}, "`MAX_WORKER_NUM` is not set; pass `lanes`"),
        ({"lanes": 4}, "pass `fixed_global_batch_size=True`"),
        ({"fixed_global_batch_size": True, "lanes": 0}, "`lanes` is 0"),
        ({"order": "any"}, "takes no `order`"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_way_out(settings, message, monkeypatch):
    monkeypatch.delenv("MAX_WORKER_NUM", raising=False)
    with pytest.raises(steadfast.InvalidError, match=message):
        et.DistributedOptimizer(net_and_optimizer()[1], **settings)


def test_an_optimizer_is_wrapped_once_and_is_pytorchs():
    _, optimizer = net_and_optimizer()
    wrapped = et.DistributedOptimizer(optimizer)
    with pytest.raises(steadfast.InvalidError, match="already"):
        et.DistributedOptimizer(wrapped)
    with pytest.raises(steadfast.InvalidError, match="of the type object"):
        et.DistributedOptimizer(object())


def test_a_pass_without_a_gradient_is_refused():
    _, optimizer = net_and_optimizer()
    with pytest.raises(steadfast.InvalidError, match="no gradient for any parameter"):
        et.DistributedOptimizer(optimizer).step()
