"""Kills a worker or a parameter server of TensorFlow's ParameterServerStrategy, and waits for the next step.

recover_tensorflow.py DATA worker|ps SECONDS
"""

import json
import math
import os
import pathlib
import sys
import threading
import time
import traceback

import task
import train_tensorflow

STEPS_BEFORE = 40


def measure(directory: pathlib.Path, role: str, seconds: float, cluster: dict, servers: dict):
    """Returns the seconds to the next step, or why there can be none."""
    training = train_tensorflow.prepare(directory, task.SIZES["small"], 1, cluster)
    begun_and_done = []

    def work() -> None:
        try:
            while True:
                begun = time.time()
                training.schedule().fetch()
                begun_and_done.append((begun, time.time()))
        except Exception:
            # The coordinator reports the loss of a parameter server in each call.
            traceback.print_exc()

    # As many as there are workers: while one waits for a closure of the killed worker, the others go on.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(task.WORKERS)]
    for thread in threads:
        thread.start()
    while len(begun_and_done) < STEPS_BEFORE:
        time.sleep(0.01)
    servers[role][-1].kill()
    killed = time.time()
    while time.time() < killed + seconds:
        found = [done for begun, done in list(begun_and_done) if killed < begun]
        if found:
            return min(found) - killed
        if not any(it.is_alive() for it in threads):
            return "none: the program ends with an error"
        time.sleep(0.01)
    return math.inf


def main() -> None:
    cluster, servers = train_tensorflow.start_all()
    try:
        found = measure(pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), cluster, servers)
        pathlib.Path(os.environ["TEST_LOGS"], "recovery.json").write_text(json.dumps(found))
    except Exception:
        traceback.print_exc()
    train_tensorflow.end(servers)


if __name__ == "__main__":
    main()
