"""A convolutional network on handwritten digits, in PyTorch."""

import steadfast.torch as st
import torch


def build(spec):
    net = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(32 * 4 * 4, 10),
    )
    return st.Model(
        net,
        loss=torch.nn.functional.cross_entropy,
        metrics={"accuracy": st.accuracy},
        buffers="mean",  # the running statistics of BatchNorm
    )
