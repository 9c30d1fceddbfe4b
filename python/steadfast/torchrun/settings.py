"""The command line of ``torchrun``, as far as it is about the rendezvous.

Keys of ``--rdzv-conf``, in seconds:

- ``join_timeout``: how long this node waits for others. By default ``timeout``, which torchrun sets to 900. The job
  has a join timeout of its own, which the coordinator sets; the shorter one applies.
- ``lease``: how long this node may be silent until it counts as lost. By default 5. The end of its process is noticed
  at once.
- ``last_call_timeout``: ignored, so that scripts for other backends work as they are. The last call is a setting of
  the job, the same for all nodes: ``--last-call`` of ``steadfast rendezvous``, or the job file.

``steadfast-c10d`` also takes the keys of PyTorch's ``c10d`` that are about time. There, ``last_call_timeout`` applies.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import Any, Dict, FrozenSet, List, Optional, Tuple
from urllib.parse import urlsplit

from ..errors import InvalidError

__all__ = ["C10D_KEYS", "KEYS", "Settings", "parse"]

KEYS: FrozenSet[str] = frozenset({"join_timeout", "last_call_timeout", "lease", "timeout"})
"""The keys of ``--rdzv-conf`` for ``--rdzv-backend=steadfast``."""

C10D_KEYS: FrozenSet[str] = KEYS | {
    "cas_backoff_max_seconds",
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
}
"""The keys of ``--rdzv-conf`` for ``--rdzv-backend=steadfast-c10d``."""

MAY_BE_ZERO = frozenset({"cas_backoff_max_seconds", "last_call_timeout"})


@dataclass(frozen=True)
class Settings:
    """A valid command line."""

    endpoints: Tuple[str, ...]
    job: str
    host: str
    """The address at which other nodes reach this one."""
    nodes_min: int
    nodes_max: int
    join_timeout: float
    last_call_timeout: Optional[float]
    """`None` unless it was given."""
    lease: Optional[float]

    @property
    def address(self) -> str:
        """``host:port`` of this node. torchrun listens on no port of its own, so it is 0."""
        return f"[{self.host}]:0" if ":" in self.host else f"{self.host}:0"

    def for_node(self) -> Dict[str, str]:
        """Returns the settings of the node, as durations."""
        return {} if self.lease is None else {"lease": f"{round(self.lease * 1000)}ms"}


def parse(params: Any, known: FrozenSet[str]) -> Settings:
    """Checks torchrun's parameters, and reports all errors in one message.

    Raises:
        InvalidError: A parameter is invalid or unknown.
    """
    errors: List[str] = []
    endpoints = _endpoints(params.endpoint, errors)
    job = str(params.run_id or "")
    if job in ("", "none"):
        errors.append("--rdzv-id is missing: use the same name of the job on all nodes")
    seconds = _seconds(params.config, known, errors)
    if errors:
        raise InvalidError("; ".join(errors))
    return Settings(
        endpoints=endpoints,
        job=job,
        host=params.local_addr or _own_address(endpoints),
        nodes_min=params.min_nodes,
        nodes_max=params.max_nodes,
        join_timeout=seconds.get("join_timeout", seconds.get("timeout", 600.0)),
        last_call_timeout=seconds.get("last_call_timeout"),
        lease=seconds.get("lease"),
    )


def _endpoints(text: Optional[str], errors: List[str]) -> Tuple[str, ...]:
    endpoints = tuple(it.strip() for it in (text or "").split(",") if it.strip())
    if not endpoints:
        errors.append("--rdzv-endpoint is missing: use HOST:PORT, or several, separated by commas")
    for endpoint in endpoints:
        if _host_and_port(endpoint) is None:
            errors.append(f"--rdzv-endpoint: `{endpoint}` is not HOST:PORT")
    return endpoints


def _host_and_port(endpoint: str) -> Optional[Tuple[str, int]]:
    scheme, separator, rest = endpoint.rpartition("://")
    if (separator and scheme not in ("http", "https")) or not re.fullmatch(r"[\w.:\[\]-]+", rest):
        return None
    try:
        url = urlsplit(f"//{rest}")
        host, port = url.hostname, url.port
    except ValueError:
        return None
    return (host, port) if host and port else None


def _seconds(given: Dict[str, Any], known: FrozenSet[str], errors: List[str]) -> Dict[str, float]:
    seconds: Dict[str, float] = {}
    for key, value in given.items():
        if key not in known:
            errors.append(f"--rdzv-conf: unknown key `{key}`; known are {', '.join(sorted(known))}")
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = -1.0
        if 0 < number < 1e9 or (number == 0 and key in MAY_BE_ZERO):
            seconds[key] = number
        else:
            errors.append(f"--rdzv-conf: `{key}={value}` is not a number of seconds")
    return seconds


def _own_address(endpoints: Tuple[str, ...]) -> str:
    """Returns the address from which an endpoint is reached. This needs no name of this host in DNS."""
    for endpoint in endpoints:
        host, port = _host_and_port(endpoint) or ("", 0)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            for family, kind, protocol, _, address in found:
                with socket.socket(family, kind, protocol) as probe:
                    # Nothing is sent: connecting a UDP socket only chooses the route.
                    probe.connect(address)
                    return str(probe.getsockname()[0])
        except OSError:
            continue
    raise InvalidError(f"--rdzv-endpoint: no route to {', '.join(endpoints)}; check the names, or set --local-addr")
