"""A pipeline on each of two hosts, under `MultiWorkerMirroredStrategy`.

Run with an argument, this file is the program of a host.
"""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gpipe
from tests import quick_python
from tests.tf_gpipe.devices.cluster_test import unused_address
from tests.tf_gpipe.devices.replicas_test import data
from tests.tf_gpipe.devices.replicas_test import dense
from tools import child_process


def fit(strategy, **kwargs):
    """Trains three steps; returns losses, variables, slots and predictions."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        if kwargs:
            model = tf_gpipe.PipelinedSequential(dense(), **kwargs)
        else:
            model = keras.Sequential(dense())
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    x, y, _ = data()
    history = model.fit(x, y, batch_size=16, shuffle=False, verbose=0).history
    scores = model.evaluate(x, y, batch_size=16, verbose=0)
    return [
        [history["loss"][-1], history["accuracy"][-1], *scores],
        *map(np.asarray, [*model.variables, *model.optimizer.variables]),
        model.predict(x, batch_size=16, verbose=0),
    ]


def main(path):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    found = fit(
        tf.distribute.MultiWorkerMirroredStrategy(),
        num_stages=2,
        num_micro_batches=3,
    )
    np.savez(path, *found)


class MultiWorkerTest(tf.test.TestCase):
    @pytest.mark.slow
    def test_equals_one_process(self):
        cluster = {"worker": [unused_address(), unused_address()]}
        paths, processes = [], []
        for index in range(2):
            paths.append(os.path.join(self.get_temp_dir(), f"{index}.npz"))
            config = {
                "cluster": cluster,
                "task": {"type": "worker", "index": index},
            }
            processes.append(
                subprocess.Popen(
                    [
                        *quick_python.command(),
                        "-m",
                        "tests.tf_gpipe.devices.multi_worker_test",
                        paths[-1],
                    ],
                    env={**os.environ, "TF_CONFIG": json.dumps(config)},
                    preexec_fn=child_process.end_with_parent,
                )
            )
        for process in processes:
            self.assertEqual(process.wait(), 0)
        expected = fit(tf.distribute.get_strategy())
        for path in paths:
            with np.load(path) as found:
                self.assertLen(found.files, len(expected))
                for a, b in zip(expected, found.values(), strict=True):
                    self.assertAllClose(a, b, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main(sys.argv[1])
