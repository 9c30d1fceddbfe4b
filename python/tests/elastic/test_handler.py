"""The parts of the handlers for `torchrun`, without processes."""

from __future__ import annotations

import pathlib
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Optional

import pytest
import steadfast

torch = pytest.importorskip("torch")
torch_api = pytest.importorskip("torch.distributed.elastic.rendezvous.api")

from steadfast import _native  # noqa: E402
from steadfast.torchrun.c10d import MasterBackend, MasterStore  # noqa: E402
from steadfast.torchrun.handler import Handler, _check_address  # noqa: E402
from steadfast.torchrun.node import Member, until_answered  # noqa: E402
from steadfast.torchrun.settings import C10D_KEYS, KEYS, parse  # noqa: E402
from steadfast.torchrun.store import RoundStore, open_store  # noqa: E402
from torch.distributed.elastic.agent.server.api import WorkerSpec  # noqa: E402
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent  # noqa: E402
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: E402
from torchrun_cluster import Coordinator, until  # noqa: E402


def params(endpoint: str = "127.0.0.1:1", nodes: int = 1, nodes_max: int = 0, **more: Any) -> Any:
    given: Dict[str, Any] = {"run_id": "job", "backend": "steadfast", **more}
    return torch_api.RendezvousParameters(endpoint=endpoint, min_nodes=nodes, max_nodes=nodes_max or nodes, **given)


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Coordinator]:
    """A job of as many nodes as the test says, or one."""
    made = Coordinator(tmp_path, "job", str(getattr(request, "param", 1)), "1s", "10m")
    yield made
    made.close()


one_node = pytest.mark.parametrize("job", [1], indirect=True)
two_nodes = pytest.mark.parametrize("job", [2], indirect=True)


def handler_at(job: Coordinator, nodes: int = 1) -> Handler:
    return Handler(parse(params(job.endpoint, nodes), KEYS), node_at(job, nodes))


def node_at(job: Coordinator, nodes: int = 1) -> Any:
    address = {"address": "127.0.0.1:0", "slots": 1}
    return _native.Node([job.endpoint], "job", **address, nodes_min=nodes, nodes_max=nodes, settings={})


class Scripted:
    """A node whose answer to `waiting` the test sets."""

    def __init__(self, answer: Any = 0, closed: bool = False) -> None:
        self.answer, self.closed, self.left = answer, closed, False
        self.succeeded: List[int] = []

    def waiting(self, round: int) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def is_closed(self) -> bool:
        return self.closed

    def succeed(self, round: int, timeout: float) -> bool:
        self.waiting(round)
        self.succeeded.append(round)
        return False

    def close(self) -> None:
        self.left = True


def scripted(answer: Any = 0, closed: bool = False) -> Handler:
    return Handler(parse(params(), KEYS), Scripted(answer, closed))


@pytest.mark.parametrize(
    "answer, closed, seen",
    [
        (0, False, 0),
        (2, False, 2),
        (-1, False, 1),
        # After success, nodes leave.
        (-1, True, 0),
        (steadfast.UnavailableError("no master"), False, 0),
        (steadfast.RendezvousClosed("the job has ended"), True, 0),
        (steadfast.NotFoundError("the lease ended"), False, 1),
    ],
)
def test_lost_nodes_count_like_nodes_that_wait(answer: Any, closed: bool, seen: int) -> None:
    """S002-4: an agent that polls `num_nodes_waiting` restarts its workers in the next round."""
    assert scripted(answer, closed).num_nodes_waiting() == seen


def in_round(handler: Handler) -> Handler:
    handler._round = 3
    return handler


def test_a_node_that_leaves_after_a_failure_has_not_succeeded() -> None:
    handler = in_round(scripted())
    try:
        raise RuntimeError("a worker failed")
    except RuntimeError:
        assert handler.shutdown()
    assert handler._node.left and not handler._node.succeeded
    assert handler.shutdown() and handler._node.succeeded == [3]


def test_a_node_that_succeeded_ends_with_an_error_if_another_one_failed() -> None:
    """S003-25: torchrun cannot run its workers again at that point, and the job has not succeeded."""
    handler = in_round(scripted(steadfast.RoundEnded("round 3 lost 127.0.0.1:7")))
    with pytest.raises(torch_api.RendezvousError, match="round 3 lost 127.0.0.1:7; all have to run again"):
        handler.shutdown()
    assert handler._node.left


@two_nodes
def test_a_job_succeeds_with_the_last_of_its_nodes(job: Coordinator) -> None:
    nodes = [node_at(job, 2), node_at(job, 2)]
    rounds: List[Any] = []
    joining = [threading.Thread(target=lambda it=it: rounds.append(it.join(0, 30))) for it in nodes]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    assert not nodes[0].succeed(1, 0.0), "the other one runs"
    assert nodes[1].waiting(1) == 0
    nodes[0].close()
    assert nodes[1].waiting(1) == 0, "its success stays"
    assert nodes[1].succeed(1, 30.0)
    assert job.process.ends() == 0


@two_nodes
def test_torchruns_exit_barrier_ends_early_if_another_node_has_failed(
    job: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S003-25: it would wait for five minutes, and the job would count as successful."""
    monkeypatch.setattr("steadfast.torchrun.handler.EXIT_SECONDS", 0.1)
    handlers = [handler_at(job, 2), handler_at(job, 2)]
    infos: Dict[int, Any] = {}

    def join(index: int) -> None:
        infos[index] = handlers[index].next_rendezvous()

    joining = [threading.Thread(target=join, args=(index,)) for index in range(2)]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    # The workers of the second node fail: it asks for another round.
    again = threading.Thread(target=join, args=(1,), daemon=True)
    again.start()
    begun = time.monotonic()
    with pytest.raises(torch.distributed.DistStoreError, match="has failed"):
        infos[0].store.wait(["torchelastic/agent/terminal_state/last_member"], timedelta(minutes=5))
    assert time.monotonic() - begun < 60
    with pytest.raises(torch_api.RendezvousError, match="all have to run again"):
        handlers[0].shutdown()
    comes = handler_at(job, 2)
    comes.next_rendezvous()
    again.join(30)
    for handler in (comes, handlers[1]):
        assert handler.shutdown()
    assert job.process.ends() == 0


@pytest.mark.parametrize(
    "endpoint, expected",
    [
        ("127.0.0.1:1", ("127.0.0.1:1",)),
        (" localhost:1 , 127.0.0.1:2,", ("localhost:1", "127.0.0.1:2")),
        ("[::1]:3", ("[::1]:3",)),
        ("https://127.0.0.1:4", ("https://127.0.0.1:4",)),
    ],
)
def test_endpoints_are_a_list(endpoint: str, expected: Any) -> None:
    assert parse(params(endpoint, local_addr="h"), KEYS).endpoints == expected


@pytest.mark.parametrize(
    "endpoint",
    ["", "host", "host:", ":1", "host:65536", "a b:1", "ftp://host:1", "h:1/path", "[::1"],
)
def test_other_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(steadfast.InvalidError, match="--rdzv-endpoint"):
        parse(params(endpoint), KEYS)


def test_timeouts_are_those_of_the_command_line() -> None:
    settings = parse(params(timeout=900, join_timeout="2.5", lease="3"), KEYS)
    assert (settings.join_timeout, settings.for_node()) == (2.5, {"lease": "3000ms"})
    settings = parse(params(timeout=900), KEYS)
    assert (settings.join_timeout, settings.for_node()) == (900, {})


@pytest.mark.parametrize(
    "conf", [{"join_timeout": "0"}, {"lease": "-1"}, {"last_call_timeout": "nan"}, {"lease": "5s"}]
)
def test_invalid_timeouts_are_refused(conf: Dict[str, str]) -> None:
    with pytest.raises(steadfast.InvalidError, match="is not a number of seconds"):
        parse(params(**conf), KEYS)


def test_keys_of_the_other_backend_are_unknown() -> None:
    parse(params(close_timeout="3"), C10D_KEYS)
    with pytest.raises(steadfast.InvalidError, match="unknown key `close_timeout`; known are join_timeout"):
        parse(params(close_timeout="3"), KEYS)


def test_the_address_is_the_one_that_reaches_the_endpoint() -> None:
    assert parse(params("127.0.0.1:1"), KEYS).address == "127.0.0.1:0"
    assert parse(params("127.0.0.1:1", local_addr="fd00::1"), KEYS).address == "[fd00::1]:0"


def test_a_node_that_others_cannot_reach_says_so() -> None:
    members = [Member(host, f"{host}:0", 1, 0) for host in ("127.0.0.1", "10.0.0.9")]
    with pytest.raises(torch_api.RendezvousError, match="other machines cannot reach this node at 127.0.0.1"):
        _check_address("127.0.0.1", members)
    _check_address("10.0.0.9", members)
    _check_address("127.0.0.1", members[:1])


@one_node
def test_each_round_has_a_store_of_its_own(job: Coordinator) -> None:
    handler = handler_at(job)
    first = handler.next_rendezvous()
    first.store.set("key", "value")
    second = handler.next_rendezvous()
    assert first.bootstrap_store_info.master_port != second.bootstrap_store_info.master_port
    assert not second.store.check(["key"])
    assert (second.rank, second.world_size) == (0, 1)
    assert handler.shutdown()
    assert job.process.ends() == 0


def test_a_node_waits_while_masters_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.torchrun.node.RETRY_SECONDS", 0.0)
    answers = iter([steadfast.UnavailableError("no master"), steadfast.UnavailableError("no master"), 7])

    def call(left: float) -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert until_answered(call, time.monotonic() + 60) == 7
    with pytest.raises(steadfast.UnavailableError):
        until_answered(Scripted(steadfast.UnavailableError("no master")).waiting, time.monotonic())


@two_nodes
def test_a_round_that_ends_in_between_is_joined_again(job: Coordinator) -> None:
    """A member dies after the round was formed, before it entered the barrier."""
    handler, dies = handler_at(job, 2), node_at(job, 2)
    infos: List[Any] = []
    waits = threading.Thread(target=lambda: infos.append(handler.next_rendezvous()))
    waits.start()
    dies.join(0, 30)
    dies.close()
    comes = handler_at(job, 2)
    infos.append(comes.next_rendezvous())
    waits.join(30)
    assert sorted(it.rank for it in infos) == [0, 1]
    # The status follows.
    until(lambda: job.status()["round"] == 2, lambda: str(job.status()))


def elastic_agent(handler: Any) -> LocalElasticAgent:
    spec = WorkerSpec(role="default", local_world_size=2, entrypoint="true", rdzv_handler=handler, max_restarts=0)
    return LocalElasticAgent(spec, DefaultLogsSpecs())


@two_nodes
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_survives_a_node_that_dies_while_ranks_are_assigned(job: Coordinator, rank: int) -> None:
    """It would wait for five minutes, and end."""
    # The one that registered first is the first.
    names = ["lives", "dies"] if rank == 0 else ["dies", "lives"]
    nodes = {name: node_at(job, 2) for name in names}
    dies, lives = nodes["dies"], nodes["lives"]
    rounds: Dict[str, Any] = {}
    stores: Dict[str, Any] = {}

    def join(name: str, node: Any) -> None:
        rounds[name] = node.join(0, 30)
        stores[name], _ = open_store(node, rounds[name], "127.0.0.1", time.monotonic() + 30)

    threads = [threading.Thread(target=join, args=it) for it in nodes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    formed = rounds["lives"]
    assert formed.rank == rank
    dies.close()
    stores.pop("dies")
    store = RoundStore(stores["lives"], formed, lives)
    torchrun = elastic_agent(SimpleNamespace())
    workers = torchrun._assign_worker_ranks(store, rank, 2, torchrun.get_worker_group().spec)
    assert [it.global_rank for it in workers] == [2 * rank, 2 * rank + 1]
    assert {it.world_size for it in workers} == {4}


class Register:
    """A node that only keeps a state."""

    def __init__(self) -> None:
        self.state: Optional[bytes] = None
        self.token = 0
        self.lock = threading.Lock()

    def get_state(self) -> Any:
        with self.lock:
            return None if self.state is None else (self.state, self.token)

    def set_state(self, state: bytes, token: Optional[int]) -> Any:
        with self.lock:
            accepted = token == (None if self.state is None else self.token)
            if accepted:
                self.state, self.token = state, self.token + 1
            return self.state, self.token, accepted


@pytest.fixture(params=["in memory", "master"])
def register(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "in memory":
        yield Register()
        return
    node = node_at(request.getfixturevalue("job"))
    yield node
    node.close()


def test_a_state_is_only_replaced_with_its_token(register: Any) -> None:
    """S002-6, S002-7: the master keeps the state; only with its token it is replaced.

    PyTorch's own conformance test of backends, in short.
    """
    backend = MasterBackend(register)
    assert backend.get_state() is None
    state, token, accepted = backend.set_state(b"one")
    assert (state, accepted) == (b"one", True)
    assert backend.get_state() == (b"one", token)
    assert backend.set_state(b"two", None) == (b"one", token, False)
    assert backend.set_state(b"two", "other") == (b"one", token, False)
    _, newer, accepted = backend.set_state(b"two", token)
    assert accepted and newer != token
    assert backend.set_state(b"three", token) == (b"two", newer, False)


def test_a_store_beside_the_state_loses_no_addition(register: Any) -> None:
    backend, store = MasterBackend(register), MasterStore(register)
    backend.set_state(b"state")
    adders = [threading.Thread(target=lambda: [store.add("count", 1) for _ in range(50)]) for _ in range(4)]
    for it in adders:
        it.start()
    for it in adders:
        it.join()
    assert store.get("count") == b"200"
    assert backend.get_state()[0] == b"state"


def test_a_store_keeps_the_keys_of_two_rounds(register: Any) -> None:
    import torch.distributed as dist

    store = MasterStore(register)
    for number in range(5):
        dist.PrefixStore(f"torch.rendezvous.job.1.{number}", store).set("key", str(number))
    kept = [dist.PrefixStore(f"torch.rendezvous.job.1.{it}", store).check(["key"]) for it in range(5)]
    assert kept == [False, False, False, True, True]
    with pytest.raises(dist.DistStoreError, match="missing"):
        store.wait(["missing"], timedelta(milliseconds=1))
