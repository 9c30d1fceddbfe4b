"""The sources of a model: a job whose model is edited while it runs would give other parameters without a word."""

from __future__ import annotations

import hashlib
import os
import site
import sys
import sysconfig
from types import ModuleType
from typing import Any, Dict, Mapping, Optional, Tuple

__all__ = ["modules"]

_MODULES_MAX = 1000
"""The record of all modules is one value in etcd."""

_INSTALLED = ("site-packages", "dist-packages")
"""Names of directories of installed packages."""

_known: Dict[str, Tuple[Any, Optional[str]]] = {}
"""The loader's description of each module when it was read, and the digest. A file may be edited while the process
runs what it has loaded; a module that was loaded again has another description."""


def modules(spec: Mapping[str, Any], model: object) -> Dict[str, str]:
    """Returns the SHA-256 of the source of each imported module that is not part of Python or of an installed package.

    Only files of Python count: what a compiler makes of the same source differs between machines. An installed package
    counts too if the model comes from it: from ``model.entry`` in ``spec``, or by its class.
    """
    entry = str(spec.get("entry") or "").partition(":")[0]
    of_model = {name.partition(".")[0] for name in (entry, type(model).__module__)} - {"steadfast", ""}
    libraries = _libraries()
    found: Dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        file = _file(module)
        if file is None or not (name.partition(".")[0] in of_model or _is_own(name, file, libraries)):
            continue
        digest = _digest(name, module, file)
        if digest is not None and len(found) < _MODULES_MAX:
            found[name] = digest
    return found


def _libraries() -> Tuple[str, ...]:
    own = os.path.dirname(os.path.abspath(__file__))
    paths = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages(), own}
    # A prefix such as `/usr` is no directory of modules.
    kept = paths - {sysconfig.get_path("data"), sysconfig.get_path("scripts")}
    return tuple(os.path.realpath(path) + os.sep for path in kept)


def _file(module: object) -> Optional[str]:
    """Returns the path of a module's source, without an attribute access that would import something."""
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return file if isinstance(file, str) and file.endswith(".py") else None


def _is_own(name: str, file: str, libraries: Tuple[str, ...]) -> bool:
    if name in ("sitecustomize", "usercustomize"):
        return False
    file = os.path.realpath(file)
    return not (file.startswith(libraries) or any(it in file.split(os.sep) for it in _INSTALLED))


def _digest(name: str, module: ModuleType, file: str) -> Optional[str]:
    spec = vars(module).get("__spec__")
    before = _known.get(name)
    if before is None or before[0] is not spec:
        before = _known[name] = (spec, _read(file))
    return before[1]


def _read(file: str) -> Optional[str]:
    try:
        with open(file, "rb") as source:
            # Equal on machines with other line ends.
            return hashlib.sha256(source.read().replace(b"\r\n", b"\n")).hexdigest()
    except OSError:
        return None
