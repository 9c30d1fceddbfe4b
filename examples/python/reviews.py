"""Tells praise from complaint, in PyTorch: `transform` makes numbers of text before each computation."""

import zlib

import numpy as np
import steadfast.torch as st
import torch

WORDS = 1024


class Reviews(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.words = torch.nn.EmbeddingBag(WORDS, width, mode="mean", include_last_offset=True)
        self.output = torch.nn.Linear(width, 2)

    def forward(self, words, offsets):
        return self.output(self.words(words, offsets))


def words(batch, key):
    """Numbers of the words of each text; in training, every tenth word is left out."""
    random = np.random.default_rng(key.seed) if key else None
    numbers, offsets = [], [0]
    for text in batch["text"]:
        for word in text.lower().strip(".").split():
            if random is None or random.random() > 0.1:
                numbers.append(zlib.crc32(word.encode()) % WORDS)
        offsets.append(len(numbers))
    return {"words": (np.array(numbers, np.int64), np.array(offsets)), "label": batch["label"]}


def build(spec):
    return st.Model(
        Reviews(),
        loss=torch.nn.functional.cross_entropy,
        metrics={"accuracy": st.accuracy},
        inputs="words",
        transform=words,
    )
