"""Ports for servers that tests start."""

import contextlib
import random
import socket

_PORTS = iter(random.sample(range(10_000, 30_000), 10_000))
"""Ports that the kernel gives to no outgoing connection, as a rule, in the order in which they are tried."""


def free_port() -> int:
    """A port at which nothing listens, and which no call before has returned."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")
