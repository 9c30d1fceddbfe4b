"""The perceptron of the benches, for every program that trains with PyTorch."""

from __future__ import annotations

from typing import Sequence

import torch


def perceptron(features: int, hidden: Sequence[int], classes: int) -> torch.nn.Sequential:
    widths = [features, *hidden, classes]
    net = torch.nn.Sequential()
    for inputs, outputs in zip(widths, widths[1:]):
        net.append(torch.nn.Linear(inputs, outputs))
        net.append(torch.nn.ReLU())
    # The last layer has no activation.
    return net[:-1]
