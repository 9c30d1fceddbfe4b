"""Trains the click model with Steadfast: train_clicks_steadfast.py DATA SIZE WORKERS.

There are as many pservers as workers.
"""

import os
import pathlib
import sys

import clicks
import steadfast
import task
import train_steadfast

LANES = 2
"""For any number of workers, so that both jobs have the same result."""


def job(directory: pathlib.Path, size: clicks.Clicks) -> steadfast.Job:
    return steadfast.Job(
        name=f"peers-{size.name}",
        mode="sync",
        passes=size.passes,
        dataset=dict(
            source=clicks.tsv(directory, size),
            format="tsv",
            header="absent",
            label="0",
            features=[str(1 + it) for it in range(clicks.COUNTS)],
            missing=0.0,
            transform="log1p",
            categories=[str(1 + clicks.COUNTS + it) for it in range(clicks.COLUMNS)],
            records_per_task=size.records_per_task,
        ),
        model=dict(kind="deepfm", classes=2, factors=size.factors, hidden=size.hidden),
        optimizer=dict(kind="adagrad"),
        learning_rate=dict(base=size.learning_rate),
        sync=dict(lanes=LANES, micro_batch=size.batch // LANES),
        # Only that of the final parameters, which comes after the time that is measured.
        evaluation=dict(fraction=clicks.HELD_OUT, every_passes=size.passes),
        checkpoint=dict(every="1h"),
    )


def main() -> None:
    directory, size, workers = pathlib.Path(sys.argv[1]), clicks.CLICKS, int(sys.argv[3])
    logs = pathlib.Path(os.environ["TEST_LOGS"], "job")
    with train_steadfast.start(job(directory, size), logs, workers) as run:
        summary = run.wait()
    start, end, records = train_steadfast.measured(run, size.records_of_pass)
    # That of the records that are held out.
    task.report(start, end, records / 1000, summary["loss"])


if __name__ == "__main__":
    main()
