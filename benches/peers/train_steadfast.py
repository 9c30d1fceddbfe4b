"""Trains with Steadfast: train_steadfast.py DATA SIZE built-in|torch sync|async."""

import os
import pathlib
import sys
from typing import Tuple

import steadfast
import steadfast.run
import task

HERE = pathlib.Path(__file__).parent


def job(
    directory: pathlib.Path,
    size: task.Size,
    model: str,
    mode: str,
    passes: int,
    checkpoints: str,
    warm_spares: int = 0,
) -> steadfast.Job:
    shape = dict(hidden=size.hidden, classes=size.classes)
    models = {
        "built-in": dict(kind="mlp", **shape),
        "torch": dict(kind="python", entry="models:build", options=shape),
    }
    made = steadfast.Job(
        name=f"peers-{size.name}",
        mode=mode,
        passes=passes,
        warm_spares=warm_spares,
        dataset=dict(
            source=task.csv(directory, size),
            format="csv",
            features=["x*"],
            label="label",
            feature_scale=task.SCALE,
            records_per_task=size.records_per_task,
        ),
        model=models[model],
        learning_rate=dict(base=size.learning_rate),
        sync=dict(lanes=task.WORKERS, micro_batch=size.batch),
        async_=dict(batch=size.batch),
        checkpoint=dict(every=checkpoints),
    )
    # That of the module `models`.
    made.directory = HERE.parent / "python"
    return made


def start(
    made: steadfast.Job, data_dir: pathlib.Path, trainers: int = task.WORKERS, pservers: int = task.PSERVERS
) -> steadfast.LocalRun:
    # Watching costs time of the same cores.
    steadfast.run._POLL_RARELY = 1.0
    return steadfast.local(made, trainers=trainers, pservers=pservers, data_dir=data_dir, progress=False)


def measured(run: steadfast.LocalRun, warm_up: float) -> Tuple[float, float, int]:
    """Returns start and end of what is measured of a finished job, and its records, given those of the warm-up."""
    # The last point is that of the end of the processes.
    points = [run._points[key] for key in sorted(run._points)][:-1]
    warm = [it for it in points if warm_up <= it["examples"]]
    # In those after the last record, the job evaluates and saves the model.
    trained = [it for it in warm if it["examples"] < warm[-1]["examples"]]
    if not trained:
        sys.exit("the job ended before there were two samples; let it make more passes")
    first, last = trained[0], warm[len(trained)]
    return first["unix_ms"] / 1000, last["unix_ms"] / 1000, last["examples"] - first["examples"]


def main() -> None:
    directory, size = pathlib.Path(sys.argv[1]), task.SIZES[sys.argv[2]]
    model, mode = sys.argv[3:]
    with start(
        job(directory, size, model, mode, size.passes, "1h"), pathlib.Path(os.environ["TEST_LOGS"], "job")
    ) as run:
        run.wait()
    start_of_measured, end, records = measured(run, task.WARM_UP * size.worker_steps * size.batch)
    arrays = run.model("numpy")
    # Layers are numbered; their names sort so, since there are less than ten.
    names = sorted({name.rpartition(".")[0] for name in arrays})
    layers = [(arrays[f"{it}.weight"].T, arrays[f"{it}.bias"]) for it in names]
    task.report(start_of_measured, end, records / size.batch, task.loss(directory, size, layers))


if __name__ == "__main__":
    main()
