"""What of a module a job trains: which parameters and buffers travel, and under which names."""

from __future__ import annotations

import logging
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from ._tensor_file import Raw
from .errors import InvalidError

__all__ = [
    "Places",
    "buffer_at",
    "TYPES",
    "Untrained",
    "buffer_places",
    "check_averaged",
    "check_wrappers",
    "misfits",
    "move",
    "persistent",
    "set_buffer",
    "raw",
    "tensors",
    "trained",
    "untrained",
]

Places = List[Tuple[torch.nn.Module, str]]
"""The layers that have a tensor, each with its name there."""


_SHOWN = 8
"""The most names that an error lists."""


def trained(module: torch.nn.Module) -> Dict[str, torch.nn.Parameter]:
    """Returns the parameters that are trained, by name; tied ones once, under their first name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def buffer_places(module: torch.nn.Module) -> Dict[str, Places]:
    """Returns the places of each buffer, by its first name in the module's state, or else its first name.

    Layers may share one, which may be persistent in some of them only.
    """
    state = module.state_dict(keep_vars=True)
    names: Dict[int, str] = {}
    places: Dict[int, Places] = {}
    for prefix, layer in module.named_modules():
        for key, buffer in layer._buffers.items():
            if buffer is None:
                continue
            name = f"{prefix}.{key}".lstrip(".")
            if names.setdefault(id(buffer), name) not in state and name in state:
                names[id(buffer)] = name
            places.setdefault(id(buffer), []).append((layer, key))
    return {names[of]: found for of, found in places.items()}


def buffer_at(places: Places) -> torch.Tensor:
    """Returns a buffer: that of the first layer that has it."""
    layer, key = places[0]
    found = layer._buffers[key]
    assert found is not None
    return found


def set_buffer(places: Places, value: torch.Tensor) -> None:
    """Replaces a buffer in all layers that have it."""
    for layer, key in places:
        layer._buffers[key] = value


def move(module: torch.nn.Module, device: torch.device) -> Dict[str, Places]:
    """Moves a module to a device, and returns the places of its buffers. Layers that share one still do."""
    places = buffer_places(module)
    module.to(device)
    for layers in places.values():
        # PyTorch moves the buffers of each layer by themselves.
        set_buffer(layers, buffer_at(layers))
    return places


def persistent(module: torch.nn.Module, places: Mapping[str, Places]) -> List[str]:
    """Returns the names of the buffers that belong to the module's state."""
    state = module.state_dict(keep_vars=True)
    return [name for name in places if name in state]


TYPES: Dict[torch.dtype, str] = {
    getattr(torch, name): kind
    for name, kind in (
        ("float64", "F64"),
        ("float32", "F32"),
        ("float16", "F16"),
        ("bfloat16", "BF16"),
        ("float8_e4m3fn", "F8_E4M3"),
        ("float8_e5m2", "F8_E5M2"),
        ("int64", "I64"),
        ("int32", "I32"),
        ("int16", "I16"),
        ("int8", "I8"),
        ("uint64", "U64"),
        ("uint32", "U32"),
        ("uint16", "U16"),
        ("uint8", "U8"),
        ("bool", "BOOL"),
    )
    if hasattr(torch, name)
}
"""The types of PyTorch that safetensors files have, with their names there."""


class Untrained:
    """What belongs to a module's state, and is not trained under its own name."""

    def __init__(self) -> None:
        self.tensors: Dict[str, torch.Tensor] = {}
        """Parameters that do not require a gradient, and buffers that are not averaged, under their first names."""
        self.aliases: Dict[str, str] = {}
        """Further names of tensors, each with the first one, which may be that of a trained parameter."""


def untrained(module: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> Untrained:
    """Returns what belongs to a module's state beside the tensors that are ``given``, which travel.

    Tensors that a ``state_dict`` computes are left out: what they are after training is known to the module alone.
    """
    own = {id(it) for it in [*module.parameters(), *module.buffers()]}
    first = {id(tensor): name for name, tensor in given.items()}
    found = Untrained()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in given or id(tensor) not in own:
            continue
        known = first.setdefault(id(tensor), name)
        if known != name:
            found.aliases[name] = known
        elif tensor.dtype in TYPES and tensor.layout == torch.strided:
            found.tensors[name] = tensor
        else:
            logging.getLogger("steadfast").warning(
                "`%s` is %s (%s), which no model file has; it is not in the files of the model",
                name,
                tensor.dtype,
                tensor.layout,
            )
            del first[id(tensor)]
    return found


def raw(tensor: torch.Tensor) -> Raw:
    """Returns a tensor as a file has it."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return TYPES[tensor.dtype], list(tensor.shape), values


def tensors(found: Mapping[str, Raw]) -> Dict[str, torch.Tensor]:
    """Returns the tensors of a file.

    Raises:
        InvalidError: This version of PyTorch has no such type.
    """
    return {name: _tensor(name, *it) for name, it in found.items()}


def _tensor(name: str, kind: str, shape: Sequence[int], values: bytes) -> torch.Tensor:
    for dtype, known in TYPES.items():
        if known == kind:
            whole = torch.frombuffer(bytearray(values), dtype=dtype) if values else torch.empty(0, dtype=dtype)
            return whole.reshape(list(shape))
    raise InvalidError(f"the tensor `{name}` is {kind}, which PyTorch {torch.__version__} lacks")


def check_wrappers(module: torch.nn.Module) -> None:
    """Checks that no wrapper stands between the module and its parameters, whose names would have a prefix.

    Raises:
        InvalidError: There is one; says what to pass in its place.
    """
    for path, layer in module.named_modules():
        reason = _wrapper(layer)
        if reason is not None and trained(layer):
            where = "the module" if path == "" else f"`{path}`"
            raise InvalidError(f"{where} is wrapped in {type(layer).__name__}, {reason}")


def _wrapper(layer: torch.nn.Module) -> Optional[str]:
    """Returns why a layer that wraps a module is not taken in its place, and what to do; ``None`` of others."""
    name = type(layer).__name__
    if name == "OptimizedModule" and "_orig_mod" in layer._modules:
        return (
            "the result of `torch.compile`: its parameters would be trained as `_orig_mod.…`, names that the module "
            "itself does not have; pass the module itself, after `module.compile()` if it is to be compiled"
        )
    if isinstance(layer, torch.optim.swa_utils.AveragedModel):
        return (
            "which is an average of parameters that `update_parameters` adds to, and no job calls that: its copy would "
            "be trained in place of the module, as `module.…`; pass the module itself"
        )
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    if isinstance(layer, parallel) or name == "FullyShardedDataParallel":
        return (
            "which divides work that the trainers of the job divide already: its parameters would be trained as "
            "`module.…`, names that the module itself does not have; pass the module itself, `net.module`"
        )
    return None


def check_averaged(name: str, buffer: torch.Tensor) -> None:
    """Checks that a buffer can be averaged.

    Raises:
        InvalidError: It cannot.
    """
    is_counter = buffer.dim() == 0 and not buffer.is_floating_point() and not buffer.is_complex()
    is_float = buffer.dtype == torch.float32 and bool(torch.isfinite(buffer).all())
    if not (is_counter or is_float):
        raise InvalidError(
            f"the buffer `{name}` ({buffer.dtype}) cannot be averaged: only finite float32 buffers and "
            "counters can; register it with `persistent=False` if it never changes"
        )


def misfits(
    expected: Mapping[str, torch.Tensor], beside: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
) -> List[str]:
    """Returns in words what is missing, what is too much, and what has another shape; nothing if all fits.

    What is ``beside`` the expected tensors may be given.
    """
    known = {**beside, **expected}
    missing = [name for name in expected if name not in given]
    extra = [name for name in given if name not in known]
    both = (name for name in known if name in given)
    shapes = [
        f"`{name}` has the shape {list(given[name].shape)}, and in the module {list(known[name].shape)}"
        for name in both
        if given[name].shape != known[name].shape
    ]
    found = [f"{_listed(missing)} missing"] if missing else []
    found += [f"{_listed(extra)} not trained in this module"] if extra else []
    return found + list(_first(shapes))


def _listed(names: Sequence[str]) -> str:
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(_first([f'`{name}`' for name in names]))} {verb}"


def _first(items: Sequence[str]) -> Iterator[str]:
    yield from items[:_SHOWN]
    if len(items) > _SHOWN:
        yield f"{len(items) - _SHOWN} more"
