"""The program of a worker: ``python -m steadfast.worker MODULE...``.

It runs closures that a :class:`steadfast.Coordinator` sends, with the functions of the modules. A module is an importable
name, or the path of a Python file, such as the program of the coordinator itself. ``--listen`` sets the address for
coordinators, ``--threads`` how many closures run at once.

On SIGTERM or Ctrl-C the worker takes no more closures, finishes those that it runs, and ends; a second signal ends it at
once.
"""

import sys

from ._closure_worker import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
