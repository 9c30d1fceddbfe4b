"""A loop that reads the parameters between two works, from before the loss of a pserver until after the rollback."""

import os
import pathlib

import steadfast
from held_work import Nothing

with steadfast.Trainer(model=Nothing()) as trainer:
    for number, work in enumerate(trainer):
        work.push({}, loss_sum=0.0)
        if number != 2:
            continue
        pathlib.Path(os.environ["HELD"]).touch()
        was_unavailable = False
        while True:
            try:
                trainer.get_parameters()
            except steadfast.UnavailableError:
                was_unavailable = True
            else:
                if was_unavailable:
                    break
