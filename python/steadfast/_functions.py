"""Names of functions, by which a coordinator and its workers mean the same one."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any, Callable, Dict, Sequence

from .errors import InvalidError

__all__ = ["Modules", "name_of"]


def name_of(function: Callable[..., Any]) -> str:
    """Returns ``module:function``. In the program itself the module is the name of its file.

    Raises:
        InvalidError: A worker cannot find it: it is a lambda, a function within another one, an object.
    """
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    module = getattr(function, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        kind = type(function).__name__
        raise InvalidError(f"a {kind} has no name by which a worker finds it; pass a function of a module")
    if "<" in name:
        raise InvalidError(
            f"`{name}` has no name by which a worker finds it; closures run functions of a module, "
            "so move it there, and pass as an argument what it takes from its surroundings"
        )
    if _part_of(sys.modules.get(module), name) is not function:
        raise InvalidError(
            f"`{name}` is not a function that `{module}` itself defines by this name, so a worker does not find it; pass a "
            "function of a module, and no method of an object or of a class"
        )
    return f"{_main() if module == '__main__' else module}:{name}"


def _part_of(module: Any, path: str) -> Any:
    """Returns a function that a module defines, or a class of it: never what it has imported. ``None`` without one."""
    found = module
    for part in path.split("."):
        is_ours = found is module or (isinstance(found, type) and found.__module__ == module.__name__)
        found = getattr(found, part, None) if is_ours else None
    is_function = callable(found) and not isinstance(found, type)
    return found if is_function and getattr(found, "__module__", None) == module.__name__ else None


def _main() -> str:
    """Returns the name under which a worker imports this program."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name)
    path = getattr(main, "__file__", None)
    if path is None:
        raise InvalidError(
            "workers cannot import functions of a notebook or an interactive session; put them into a file "
            "(in a notebook with `%%writefile steps.py`), and import it here and there"
        )
    return os.path.splitext(os.path.basename(path))[0]


class Modules:
    """The modules of a worker, whose functions may run.

    Args:
        names: Importable names, or paths of Python files, which are imported under the name of the file.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._modules: Dict[str, ModuleType] = {}
        for name in names:
            module = _import_file(name) if name.endswith(".py") else _import_name(name)
            self._modules[module.__name__] = module

    def function(self, name: str) -> Callable[..., Any]:
        """Returns the function that ``module:function`` names.

        Raises:
            InvalidError: The worker was not started with the module, or the module has no such function.
        """
        module_name, _, path = name.partition(":")
        module = self._modules.get(module_name)
        if module is None:
            known = ", ".join(sorted(self._modules))
            raise InvalidError(
                f"`{name}`: this worker runs functions of {known} only; start it with the module `{module_name}`, too"
            )
        found = _part_of(module, path)
        if found is None:
            raise InvalidError(
                f"`{module_name}` at this worker ({getattr(module, '__file__', None)}) defines no function `{path}`; "
                "coordinator and workers need the same code"
            )
        return found  # type: ignore[no-any-return]


def _import_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise InvalidError(
            f"no module `{name}` in {', '.join(filter(None, sys.path[:3]))}; set PYTHONPATH, install it, "
            f"or pass the path of its file"
        ) from None


def _import_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise InvalidError(f"there is no file {path}")
    directory, file = os.path.split(os.path.abspath(path))
    name = os.path.splitext(file)[0]
    if not name.isidentifier():
        raise InvalidError(f"{path}: `{name}` cannot be imported; rename the file to letters, digits and underscores")
    # It finds the modules beside it, as a program does.
    sys.path.insert(0, directory)
    module = importlib.import_module(name)
    found = getattr(module, "__file__", None)
    if found is None or not os.path.samefile(found, path):
        raise InvalidError(f"{path}: another module is called `{name}` ({found or 'of Python'}); rename the file")
    return module
