"""A loop that holds its third work until a pipe is written to, and writes down what each push says."""

import os
import pathlib

import steadfast


class Nothing(steadfast.Model):
    def parameters(self):
        return {"weight": (1,)}

    def initialize(self, seed):
        return {}

    def gradient(self, parameters, batch, key):
        return 0.0, {}

    def evaluate(self, parameters, batch):
        return 0.0, 0.0


if __name__ == "__main__":
    held, free = pathlib.Path(os.environ["HELD"]), pathlib.Path(os.environ["FREE"])
    with steadfast.Trainer(model=Nothing()) as trainer, open(os.environ["SAID"], "w") as said:
        for number, work in enumerate(trainer):
            if number == 2:
                held.touch()
                free.read_text()
            print(work.push({}, loss_sum=0.0), file=said, flush=True)
