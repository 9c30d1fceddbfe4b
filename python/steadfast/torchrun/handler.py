"""The rendezvous of ``--rdzv-backend=steadfast``: the master forms the rounds."""

from __future__ import annotations

import atexit
import ipaddress
import logging
import sys
import time
from typing import Any, List

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from .. import errors
from .node import Member, Node, Round, open_node, torch_errors, until_answered
from .settings import KEYS, Settings, parse
from .signals import as_exceptions
from .store import RoundStore, StoreAddress, open_store

__all__ = ["Handler", "create"]

log = logging.getLogger(__name__)

EXIT_SECONDS = 10.0
CLOSE_SECONDS = 30.0


def create(params: Any) -> Handler:
    """Creates the handler for torchrun's parameters."""
    settings = parse(params, KEYS)
    if settings.last_call_timeout is not None:
        log.warning("--rdzv-conf: last_call_timeout is ignored: it is a setting of the job (--last-call)")
    return Handler(settings, open_node(settings))


class Handler(RendezvousHandler):
    """A node of an elastic job, as torchrun uses it.

    A node that leaves, for whatever reason, does not end the job for others. Only success does.
    """

    def __init__(self, settings: Settings, node: Node) -> None:
        self._settings = settings
        self._node = node
        self._round = 0
        self._warned = False
        # torchrun does not shut the rendezvous down after a signal. The others need not wait for the lease.
        atexit.register(node.close)

    def get_backend(self) -> str:
        return "steadfast"

    @property
    def use_agent_store(self) -> bool:
        """Workers use the store of the round, which is in an agent and so outlives them."""
        return True

    def get_run_id(self) -> str:
        return self._settings.job

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the next round, and returns this node's rank among its nodes and a new store."""
        deadline = time.monotonic() + self._settings.join_timeout
        try:
            with as_exceptions(), torch_errors():
                return self._next_rendezvous(deadline)
        except (SignalException, KeyboardInterrupt):
            # torchrun first stops its workers, and there are none. Others should not wait for this node.
            self._node.close()
            raise

    def _next_rendezvous(self, deadline: float) -> RendezvousInfo:
        while True:
            formed = until_answered(lambda left: self._node.join(self._round, left), deadline)
            # The next request is for a later round, even if this one ends before it is used.
            self._round = formed.round
            members = [Member(*it) for it in formed.members]
            _check_address(self._settings.host, members)
            try:
                store, address = open_store(self._node, formed, self._settings.host, deadline)
            except errors.RoundEnded as ended:
                log.info("joining again: %s", ended)
                continue
            log.info("round %d: node %d of %d", formed.round, formed.rank, len(members))
            return self._info(RoundStore(store, formed, self._node), formed, address)

    def _info(self, store: RoundStore, formed: Round, address: StoreAddress) -> RendezvousInfo:
        # torchrun counts nodes here, and numbers the workers itself.
        bootstrap = RendezvousStoreInfo(master_addr=address.host, master_port=address.port)
        return RendezvousInfo(store, formed.rank, len(formed.members), bootstrap)

    def num_nodes_waiting(self) -> int:
        """Returns how many nodes were lost from the round or wait to be added: torchrun restarts its workers."""
        try:
            changed = self._node.waiting(self._round)
            # Nodes that leave after success are not lost.
            changed = 0 if changed < 0 and self._node.is_closed() else changed
        except errors.UnavailableError as error:
            # Workers do not need the master.
            if not self._warned:
                log.warning("changes of the job's nodes are not seen: %s", error)
            self._warned = True
            return 0
        except errors.RendezvousClosed:
            return 0
        except errors.NotFoundError:
            # The lease ended, and the others go on without this node.
            return 1
        self._warned = False
        return abs(changed)

    def is_closed(self) -> bool:
        with torch_errors():
            return self._node.is_closed()

    def set_closed(self) -> None:
        with torch_errors():
            self._node.set_closed()

    def shutdown(self) -> bool:
        """Leaves the job, which succeeds when each node of the last round has left after a success.

        Raises:
            RendezvousError: This node was successful, and another one was not.
        """
        failure = sys.exc_info()[1]
        try:
            if failure is None and self._round != 0:
                self._succeed()
            return True
        except errors.RoundEnded as ended:
            raise RendezvousError(
                f"the workers of this node succeeded, but {ended}; all have to run again: start torchrun again"
            ) from ended
        except errors.SteadfastError as error:
            log.warning("other nodes do not know yet that this one has succeeded: %s", error)
            return False
        finally:
            self._node.close()

    def _succeed(self) -> None:
        """Notes the success. The store of the round is in one of the nodes, so each waits some time for the others."""
        number, seconds = self._round, EXIT_SECONDS
        deadline = time.monotonic() + CLOSE_SECONDS
        if not until_answered(lambda _left: self._node.succeed(number, seconds), deadline):
            log.info("leaving the job before other nodes have finished")


def _check_address(host: str, members: List[Member]) -> None:
    others = [it.address.rpartition(":")[0].strip("[]") for it in members]
    if _is_loopback(host) and not all(map(_is_loopback, others)):
        raise RendezvousError(
            f"other machines cannot reach this node at {host}; set --local-addr, or an --rdzv-endpoint that other "
            "machines use"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
