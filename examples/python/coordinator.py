"""Trains on workers that come and go, with a coordinator.

Start three workers, then the program, each in a terminal of its own:

    python -m steadfast.worker examples/python/coordinator.py --listen 127.0.0.1:2100
    python -m steadfast.worker examples/python/coordinator.py --listen 127.0.0.1:2101
    python -m steadfast.worker examples/python/coordinator.py --listen 127.0.0.1:2102
    python examples/python/coordinator.py

Each closure computes the gradient of one batch at the weights that it is given, and the program adds what comes back.
The second worker leaves after the first epoch, and the third one joins after the second one.
"""

import numpy
import steadfast

EPOCHS = 5
STEPS = 10
BATCH = 64
TRUE_WEIGHTS = numpy.array([2.0, -1.0, 0.5])


def per_worker_dataset_fn():
    """Returns an endless dataset of batches, which differ from worker to worker."""
    random = numpy.random.default_rng(seed=steadfast.current_closure().worker)
    while True:
        features = random.normal(size=(BATCH, len(TRUE_WEIGHTS)))
        yield features, features @ TRUE_WEIGHTS


def step_fn(iterator, weights):
    """Returns the gradient of the mean squared error of the worker's next batch."""
    features, target = next(iterator)
    return 2 * features.T @ (features @ weights - target) / len(target)


def main():
    weights = numpy.zeros(len(TRUE_WEIGHTS))
    with steadfast.Coordinator(["localhost:2100", "localhost:2101"]) as coordinator:
        per_worker_train_ds = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
        per_worker_train_iter = iter(per_worker_train_ds)
        for epoch in range(EPOCHS):
            gradients = []
            for _ in range(STEPS):
                gradients.append(coordinator.schedule(step_fn, args=(per_worker_train_iter, weights)))
            coordinator.join()
            weights = weights - 0.1 * sum(coordinator.fetch(gradients)) / STEPS
            print(f"epoch {epoch}: weights {weights.round(3)}")

            if epoch == 0:
                coordinator.remove_worker("localhost:2101")
            if epoch == 1:
                coordinator.add_worker("localhost:2102")
                per_worker_train_ds = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
                per_worker_train_iter = iter(per_worker_train_ds)


if __name__ == "__main__":
    main()
