"""A loop that sets the initial parameters, looks at them at each work, and writes the model at its end."""

import json
import os
import sys

import numpy as np
import steadfast

sys.path.insert(0, os.environ["EXAMPLES"])
import own_loop  # noqa: E402

model = own_loop.Softmax()
seen = {"first": None, "differing": 0, "pulls": 0, "unavailable": 0, "errors": []}


def error_of(call, *args):
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


with steadfast.Trainer(model=model) as trainer:
    seen["errors"].append(error_of(trainer.get_parameters))
    trainer.set_parameters({"bias": np.full(10, 0.25)})
    for work in trainer:
        if seen["first"] is None:
            seen["first"] = {name: sorted(set(it.ravel().tolist())) for name, it in work.parameters.items()}
            seen["errors"].append(error_of(trainer.set_parameters, {}))
        try:
            seen["differing"] += not equal(trainer.get_parameters(), work.parameters)
            seen["pulls"] += 1
        except steadfast.UnavailableError:
            seen["unavailable"] += 1
        loss_sum, gradients = model.gradient(work.parameters, work.batch, work.key)
        work.push(gradients, loss_sum=loss_sum)
    seen["sha256"] = trainer.save_model(os.environ["MODEL_TO"])
    seen["final"] = {name: it.tolist() for name, it in trainer.get_parameters().items()}
    seen["errors"].append(error_of(trainer.save_model, "/proc/none/model"))

# Each trainer writes it, and the file is whole, whichever comes last.
written = f"{os.environ['SEEN']}.{os.getpid()}"
with open(written, "w") as file:
    json.dump(seen, file)
os.replace(written, os.environ["SEEN"])
