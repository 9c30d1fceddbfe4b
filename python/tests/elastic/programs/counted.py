"""Uses each record of some passes once, and prints which ones the final state has seen.

usage: counted.py PASSES DIRECTORY

It waits in each pass, after update 5 and before the commit of it, until the file `go-<pass>` is in the directory.
"""

import os
import sys
import time

import numpy as np
import steadfast.elastic as elastic

PASSES, DIRECTORY = int(sys.argv[1]), sys.argv[2]
RECORDS, LANES, BATCH = 101, 4, 3

sampler = elastic.ElasticSampler(RECORDS, lanes=LANES, seed=3)
state = elastic.ObjectState(sampler=sampler, epoch=0, update=0, used=np.zeros((PASSES, RECORDS), np.int64))


def used_by_all(batches):
    """Returns how often the batches of all workers have each record, as an exchange of gradients would."""
    counts = np.zeros(RECORDS, np.int64)
    for batch in batches:
        counts[batch] += 1
    return np.array(elastic.group().max(counts.tolist()))


@elastic.run
def train(state):
    print(f"begin {state.epoch} {sampler.processed_num} of {elastic.world_size()}", flush=True)
    while state.epoch < PASSES:
        sampler.set_epoch(state.epoch)
        of_update, update = [], 0
        own = len(sampler._own_lanes())
        for index, batch in enumerate(sampler.batches(BATCH)):
            of_update.append(batch)
            if len(of_update) < own:
                continue
            state.used[state.epoch] += used_by_all(of_update)
            sampler.record_batch(index, BATCH)
            of_update, state.update = [], state.update + 1
            update = sampler.processed_num // (LANES * BATCH)
            if update == 5:
                print(f"waits in {state.epoch} as {os.getpid()}", flush=True)
                while not os.path.exists(os.path.join(DIRECTORY, f"go-{state.epoch}")):
                    time.sleep(0.02)
            if update % 2 == 1 or sampler.processed_num == RECORDS:
                state.commit()
            else:
                state.check_host_updates()
        state.epoch += 1


train(state)
print(f"used {state.used.min()} to {state.used.max()} in {state.used.size}", flush=True)
