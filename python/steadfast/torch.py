"""Models in PyTorch."""

from __future__ import annotations

import hashlib
import os
import warnings
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from .errors import InvalidError
from .model import Batch
from .model import Model as _Model
from .randomness import seed_all

__all__ = ["Model", "accuracy"]


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Returns 1 for each record whose largest output is that of its label, else 0."""
    return (output.argmax(dim=-1) == label).to(torch.float32)


class Model(_Model):
    """Trains a module.

    Args:
        module: Called with the batch's features; returns the output.
        loss: Called with output and label; returns the mean loss of the records, as PyTorch's loss
            functions do, or their sum with ``reduction="sum"``.
        metrics: One metric by name: called with output and label, returns one value for each record.
        reduction: ``"mean"`` or ``"sum"``: what ``loss`` returns.
        label: Type of the labels: ``torch.int64`` for classes, or ``torch.float32``.
        threads: Threads of one operation. Results depend on it, so it is the same in all trainers.
        buffers: What happens to buffers in the module's state, such as the running statistics of
            BatchNorm. ``"mean"`` averages their changes over the records of a step, as gradients are.
            ``"constant"`` declares that training does not change them; they stay as built. Without it, a
            module with such buffers is rejected.

    Raises:
        InvalidError: The module has parameters or buffers that cannot be trained faithfully.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        metrics: Optional[Mapping[str, Callable[..., torch.Tensor]]] = None,
        *,
        reduction: str = "mean",
        label: torch.dtype = torch.int64,
        threads: int = 1,
        buffers: Optional[str] = None,
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise InvalidError(f'`reduction` is "{reduction}"; use "mean" or "sum"')
        if buffers not in (None, "mean", "constant"):
            raise InvalidError(f'`buffers` is "{buffers}"; use "mean" or "constant"')
        if metrics is not None and len(metrics) != 1:
            raise InvalidError("`metrics` takes one metric by name")
        _deterministic(threads)
        self.module = module
        self._loss = loss
        self._reduction = reduction
        self._label = label
        self.metric_name, self._metric = next(iter((metrics or {"loss": None}).items()))
        self._trained = _trained(module)
        kept = _buffers(module)
        if kept and buffers is None:
            name = next(iter(kept))
            raise InvalidError(
                f"the buffer `{name}` is part of the module's state but no parameter, so its changes would "
                'be lost; pass `buffers="mean"` to average it over the records, or `buffers="constant"` if '
                "training does not change it"
            )
        self._averaged = kept if buffers == "mean" else {}
        self._constant = kept if buffers == "constant" else {}
        # Copies: training makes the parameters views of other arrays, and changes the buffers.
        self._initial = self._values()

    def parameters(self) -> Dict[str, List[int]]:
        return {name: list(it.shape) for name, it in {**self._trained, **self._averaged}.items()}

    def averaged(self) -> Collection[str]:
        return self._averaged.keys()

    def initialize(self, seed: int) -> Dict[str, np.ndarray]:
        fresh = self.rebuild(seed) if self.rebuild else None
        return fresh._initial if isinstance(fresh, Model) else self._initial

    def gradient(
        self, parameters: Mapping[str, np.ndarray], batch: Batch, key: Any
    ) -> Tuple[float, Dict[str, Optional[np.ndarray]]]:
        self._load(parameters)
        seed_all(key.seed)
        self.module.train()
        for parameter in self._trained.values():
            parameter.grad = None
        features, label = self._tensors(batch)
        before = {name: buffer.clone() for name, buffer in self._constant.items()}
        loss = self._sum(self._loss(self.module(features), label), len(label))
        loss.backward()
        gradients = {
            name: None if parameter.grad is None else parameter.grad.numpy()
            for name, parameter in self._trained.items()
        }
        for name, buffer in self._averaged.items():
            gradients[name] = (buffer.numpy() - parameters[name]) * np.float32(len(label))
        for name, buffer in self._constant.items():
            if not torch.equal(before[name], buffer):
                raise InvalidError(
                    f'training changes the buffer `{name}`; pass `buffers="mean"`, not "constant"'
                )
        return loss.item(), gradients

    def evaluate(self, parameters: Mapping[str, np.ndarray], batch: Batch) -> Tuple[float, float]:
        self._load(parameters)
        self.module.eval()
        with torch.no_grad():
            features, label = self._tensors(batch)
            output = self.module(features)
            loss_sum = self._sum(self._loss(output, label), len(label)).item()
            if self._metric is None:
                return loss_sum, loss_sum
            return loss_sum, self._metric(output, label).sum().item()

    def numerics(self) -> str:
        return f"torch {torch.__version__} {_digest()[:16]} with {torch.get_num_threads()} threads"

    def _load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Makes the module's parameters views of the arrays, and its buffers copies."""
        with warnings.catch_warnings():
            # The arrays are read-only, and nothing here writes to them.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            for name, parameter in self._trained.items():
                parameter.data = torch.from_numpy(parameters[name])
            for name, buffer in self._averaged.items():
                buffer.copy_(torch.from_numpy(parameters[name]))

    def _values(self) -> Dict[str, np.ndarray]:
        """Returns copies of the parameters and the averaged buffers, in float32."""
        state = {**self._trained, **self._averaged}
        return {name: it.detach().to(torch.float32, copy=True).numpy() for name, it in state.items()}

    def _tensors(self, batch: Batch) -> Tuple[torch.Tensor, torch.Tensor]:
        label = torch.from_numpy(batch["label"])
        return torch.from_numpy(batch["features"]), label.to(self._label)

    def _sum(self, loss: torch.Tensor, records: int) -> torch.Tensor:
        if loss.dim() != 0:
            raise InvalidError(
                f"the loss has the shape {list(loss.shape)}; return one number, the mean or the sum"
            )
        return loss * records if self._reduction == "mean" else loss


def _trained(module: torch.nn.Module) -> Dict[str, torch.nn.Parameter]:
    """Returns the parameters that are trained, by name; tied ones once."""
    trained = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    if not trained:
        raise InvalidError("the module has no parameter that requires a gradient")
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32:
            raise InvalidError(
                f"the parameter `{name}` is {parameter.dtype}; convert the module with `.float()`"
            )
    return trained


def _buffers(module: torch.nn.Module) -> Dict[str, torch.Tensor]:
    """Returns the buffers that are part of the module's state, by name."""
    state = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in state}


def _deterministic(threads: int) -> None:
    # cuBLAS reads this when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = False


def _digest() -> str:
    """Hashes the bits of a small fixed computation."""
    state = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        image, matrix = torch.randn(2, 3, 12, 12), torch.randn(33, 130)
        weight = torch.randn(5, 3, 3, 3, requires_grad=True)
        found = torch.nn.functional.conv2d(image, weight)
        (slope,) = torch.autograd.grad(found.square().mean(), weight)
        results: Sequence[torch.Tensor] = (
            found,
            slope,
            matrix @ matrix.T,
            torch.softmax(matrix, dim=1),
            torch.nn.functional.layer_norm(matrix, (130,)),
            torch.nn.functional.gelu(matrix),
        )
    finally:
        torch.set_rng_state(state)
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
