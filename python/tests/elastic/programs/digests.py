"""A digest of models and optimizers, to compare their bits."""

import hashlib

import torch


def digest(*stateful):
    """Returns the SHA-256 of the states, values and names."""
    found = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for it in value:
                add(it)
        else:
            found.update(repr(value).encode())

    for it in stateful:
        add(it.state_dict())
    return found.hexdigest()
