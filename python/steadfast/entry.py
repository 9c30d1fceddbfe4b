"""Finds the function that builds a model."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any, Callable, Mapping, Optional

from . import devices
from .errors import InvalidError
from .model import Model
from .randomness import seed_all

__all__ = ["build"]


def build(spec: Mapping[str, Any], features: int, device: Optional[str] = None) -> Model:
    """Builds the model that ``entry`` in the ``[model]`` section of the job file names.

    The entry is ``module:function``. The function is called with the section as an object: ``spec.options``
    has the job file's own settings, and ``spec.features`` is the number of features of a record. The model
    computes on ``device``, unless the function names another.
    """
    entry = spec.get("entry") or ""
    if not entry:
        raise InvalidError("`model.entry` is missing: use `module:function`, such as `digits:build`")
    function = _function(entry)

    def rebuild(seed: int) -> Model:
        known = "torch" in sys.modules
        seed_all(seed)
        with devices.using(device):
            model = function(SimpleNamespace(**{"options": {}, **spec, "features": features}))
        if not known and "torch" in sys.modules:
            # The function has imported PyTorch itself, whose random state was not seeded before.
            return rebuild(seed)
        return model

    # What is drawn here and not trained must be the same in every trainer.
    model = rebuild(0)
    if not isinstance(model, Model):
        kind = type(model).__name__
        raise InvalidError(
            f"`{entry}` returned a {kind}; return a steadfast.Model, such as steadfast.torch.Model(net, loss)"
        )
    model.rebuild = rebuild
    return model


def _function(entry: str) -> Callable[[Any], Model]:
    module_name, colon, function = entry.partition(":")
    if not (module_name and colon and function):
        raise InvalidError(f"`model.entry` is `{entry}`; use `module:function`, such as `digits:build`")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise
        raise InvalidError(
            f"`model.entry`: no module `{module_name}` in {', '.join(filter(None, sys.path[:3]))}; "
            "set PYTHONPATH, or install the module"
        ) from None
    found = getattr(module, function, None)
    if not callable(found):
        raise InvalidError(f"`model.entry`: {module.__file__} has no function `{function}`")
    return found
