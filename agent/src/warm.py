"""Runs in a warm worker: imports modules, waits for the variables of the worker, and runs its program as Python does.

The agent sends this source, and later the variables, through a socket. The arguments are the descriptor of the socket,
the names of the modules, and the command of the program: a file, or `-m` and a module, and their arguments.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import runpy
import sys

AUTOMATIC = "auto"


def main():
    connection, modules = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(connection, False)
    command = sys.argv[3:]
    set_arguments(command)
    for module in named(modules):
        importlib.import_module(module)
    os.environ.update(receive(connection))
    run(command)


def set_arguments(command):
    """Sets what Python derives from the command."""
    sys.argv[:] = command
    # Python 3.10 and newer have the command line of the interpreter, too.
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[sys.orig_argv.index("-c") :] = command
    # With -I or -P, it is not there.
    if sys.path[:1] == [""]:
        sys.path[0] = place_of(command[0])


def place_of(target):
    """Returns the first directory of `sys.path`."""
    if target == "-m":
        return os.getcwd()
    if pkgutil.get_importer(target):
        # A directory or an archive is such a place itself.
        return os.path.join(os.getcwd(), target)
    return os.path.dirname(os.path.realpath(target))


def named(modules):
    """Returns the modules to import; by default PyTorch, if it is installed, and what its optimizers import."""
    if modules != AUTOMATIC:
        return modules.split(",")
    return ["torch", "torch._dynamo"] if importlib.util.find_spec("torch") else []


def receive(connection):
    """Tells the agent that all is imported, waits for the variables, and says that they have come."""
    os.write(connection, b"1")
    with open(connection, "rb", closefd=False) as file:
        text = os.fsdecode(file.read())
    if not text:
        # The agent has ended, or needs no more workers.
        os._exit(0)
    os.write(connection, b"2")
    os.close(connection)
    return dict(variable.split("=", 1) for variable in text.split("\0"))


def run(command):
    target = command[0]
    try:
        if target == "-m":
            runpy._run_module_as_main(sys.argv.pop(1))
        elif pkgutil.get_importer(target):
            runpy._run_module_as_main("__main__", alter_argv=False)
        else:
            path = os.path.join(os.getcwd(), target)
            exec(compile(source_of_main(path), path, "exec", dont_inherit=True), vars(sys.modules["__main__"]))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        # The traceback begins in the program.
        found = type(error), error, error.__traceback__.tb_next
        error.__traceback__ = found[2]
        sys.last_type, sys.last_value, sys.last_traceback = found
        sys.excepthook(*found)
        sys.exit(1)


def source_of_main(path):
    """Makes a file the main module, and returns its source."""
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(sys.modules["__main__"]).update(__file__=path, __cached__=None, __loader__=loader)
    with open(path, "rb") as file:
        return file.read()


main()
