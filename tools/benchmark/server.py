"""A worker process for benchmarks: a TensorFlow server on one core.

`python -m tools.benchmark.server CORE TASK PORT PORT ...` serves as task TASK
of the job `worker` on the loopback ports given, confined to CPU core CORE.
"""

import os
import sys


def main(core, task, *ports):
    # Before TensorFlow starts its threads, so that all of them inherit it.
    os.sched_setaffinity(0, {int(core)})
    # One thread, which TensorFlow gives a process of one core, sends what a
    # task has made only after the next task.
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=2
    )
    server = tf.distribute.Server(
        {"worker": [f"127.0.0.1:{port}" for port in ports]},
        job_name="worker",
        task_index=int(task),
        config=config,
    )
    print("serving", flush=True)
    server.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
