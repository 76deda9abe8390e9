"""The trainer as processes that are killed, and on several hosts."""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import tempfile

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import quick_python
from tests.tf_gpipe.devices.cluster_test import unused_address
from tf_gpipe.checkpoints import model_variables
from tf_gpipe.checkpoints import store
from tf_gpipe.commands import workers
from tools import child_process

ROOT = pathlib.Path(__file__).parents[2]


def trainer(workdir, *flags, **environment):
    return subprocess.Popen(
        [
            *quick_python.command(),
            "-m",
            "trainers.image_classification",
            # Half of the blocks: less to trace.
            "--model_args=num_blocks=2",
            "--num_epochs=2",
            f"--workdir={workdir}",
            *flags,
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        preexec_fn=child_process.end_with_parent,
    )


STEPS_PER_EPOCH = 11


def steps_shown(text):
    """Returns how many steps the progress bars in what a trainer prints show.

    A bar leaves steps out that come within 50 ms, but for the last of an
    epoch: the number of bars would tell less.
    """
    *_, bars = text.rpartition("\nEpoch ")
    shown = re.findall(rf"(\d+)/{STEPS_PER_EPOCH}\b", bars)
    epochs = max(text.count("\nEpoch ") - 1, 0)
    return epochs * STEPS_PER_EPOCH + int(shown[-1] if shown else 0)


def wait_for_step(process, count):
    """Reads what a trainer prints until it has taken `count` steps."""
    text = ""
    while steps_shown(text) < count:
        character = process.stdout.read(1)
        assert character, text + process.stderr.read()
        text += character


def state(workdir, num_epochs=2):
    """Returns the model's and optimizer's arrays after an epoch, by name."""
    saved = store.read(workdir / "checkpoints" / f"epoch_{num_epochs:05}")
    return {
        f"{array.kind} {array.number}": saved.value(i)
        for i, array in enumerate(saved.arrays)
        if array.kind in model_variables.MODEL
    }


@pytest.mark.slow
class ProcessesTest(tf.test.TestCase, parameterized.TestCase):
    wholes: dict = {}

    def make_directory(self):
        return pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))

    def assert_same_state(self, a, b, **tolerance):
        self.assertAllEqual(sorted(a), sorted(b))
        for name in a:
            self.assertAllClose(a[name], b[name], msg=name, **tolerance)

    def finish(self, process):
        output, errors = process.communicate()
        self.assertEqual(process.returncode, 0, errors)
        return output

    def hosts(self, directories, *flags):
        """Starts a host of `--strategy=multi_worker` for each directory."""
        cluster = {"worker": [unused_address() for _ in directories]}
        return [
            trainer(
                directory,
                "--strategy=multi_worker",
                *flags,
                TF_CONFIG=json.dumps(
                    {
                        "cluster": cluster,
                        "task": {"type": "worker", "index": index},
                    }
                ),
            )
            for index, directory in enumerate(directories)
        ]

    def whole(self, num_epochs=2):
        """Returns the state after an uninterrupted run, which is made once."""
        if num_epochs not in self.wholes:
            directory = self.make_directory()
            self.finish(trainer(directory, f"--num_epochs={num_epochs}"))
            self.wholes[num_epochs] = state(directory, num_epochs)
        return self.wholes[num_epochs]

    def test_killed_at_any_step_it_resumes_exactly(self):
        parts = self.make_directory()
        steps = random.Random(0)
        # Kills it in the first epoch, in the second one, and in the second one
        # again.
        for first, last in ((1, 8), (14, 18), (1, 8)):
            process = trainer(parts)
            wait_for_step(process, steps.randint(first, last))
            process.kill()
            process.communicate()
        self.finish(trainer(parts))
        self.assert_same_state(self.whole(), state(parts), rtol=0, atol=0)

    def test_stopped_by_ctrl_c_it_resumes_exactly(self):
        parts = self.make_directory()
        process = trainer(parts)
        wait_for_step(process, 5)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
        self.assertEqual(process.returncode, 128 + signal.SIGINT, errors)
        self.assertNotIn("Traceback", errors)
        (path,) = (parts / "checkpoints").iterdir()
        # Step 5, or later ones that were not shown yet.
        self.assertRegex(path.name, r"^epoch_0000(0_step_\d{6}|1)$")
        self.assertIn(f"newest checkpoint is {path}", output)
        self.finish(trainer(parts))
        self.assert_same_state(self.whole(), state(parts), rtol=0, atol=0)

    def test_stopped_by_ctrl_c_twice(self):
        process = trainer(self.make_directory())
        wait_for_step(process, 5)
        process.send_signal(signal.SIGINT)
        while "Stopping after this step" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        self.assertEqual(process.returncode, 128 + signal.SIGINT, errors)
        self.assertNotIn("Traceback", errors)

    def test_killed_worker(self):
        workdir = self.make_directory()
        with workers.started(2) as processes:
            addresses = ",".join(x.address for x in processes)
            flags = [f"--workers={addresses}", "--num_epochs=3"]
            process = trainer(workdir, *flags)
            # This step is in the third epoch of 11 steps each: the checkpoint
            # of the first one is written by then, and that of the second one
            # may be.
            wait_for_step(process, 25)
            processes[1].kill()
            _, errors = process.communicate()
            self.assertEqual(process.returncode, 1)
            (message,) = re.findall(r"^Error: .*", errors, re.MULTILINE)
            self.assertIn("Stage 1 has failed", message)
            self.assertIn(processes[1].address, message)
            newest = rf"{workdir}/checkpoints/epoch_0000[12]"
            self.assertRegex(message, newest)
            self.assertNotIn("Traceback", errors)
            # The worker is still missing when training starts again.
            process = trainer(workdir, *flags, "--worker_timeout=10")
            _, errors = process.communicate()
            self.assertEqual(process.returncode, 1)
            self.assertRegex(
                errors,
                f"No worker answers at {processes[1].address} within 10 "
                f"seconds.* stage 1 would .*{newest}",
            )
            port = int(processes[1].address.rpartition(":")[2])
            processes[1] = workers.Worker(port=port)
            processes[1].wait_until_ready()
            output = self.finish(trainer(workdir, *flags))
            self.assertRegex(output, "Resuming: [12] epochs of 3 are done.")
        self.assert_same_state(
            self.whole(3), state(workdir, 3), rtol=1e-3, atol=1e-3
        )

    def test_elastic(self):
        workdir = self.make_directory()
        with workers.started(2) as processes:
            addresses = ",".join(x.address for x in processes)
            process = trainer(
                workdir,
                f"--workers={addresses}",
                *("--elastic", "--restarts=3", "--checkpoint_every_steps=3"),
                "--worker_timeout=10",
            )
            wait_for_step(process, 14)
            processes[1].kill()
            output, errors = process.communicate()
        self.assertEqual(process.returncode, 0, errors)
        self.assertRegex(
            errors,
            "going on without 1 of 2 workers. "
            rf"\({processes[1].address}: nothing listens there",
        )
        self.assertRegex(
            output,
            r"Training 2 stages on (\S*/task:0\S*), \1, schedule",
        )
        self.assertIn("Resuming: 1 epochs", output)
        self.assert_same_state(
            self.whole(), state(workdir), rtol=1e-3, atol=1e-3
        )

    @parameterized.parameters(signal.SIGKILL, signal.SIGSTOP)
    def test_worker_lost_at_the_start(self, number):
        with workers.started(2) as processes:
            addresses = ",".join(x.address for x in processes)
            process = trainer(
                self.make_directory(),
                f"--workers={addresses}",
                "--worker_heartbeat=4",
            )
            # The trainer has connected, and has no model yet.
            while "the client listens" not in process.stderr.readline():
                pass
            processes[1].process.send_signal(number)
            _, errors = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 1)
        (message,) = re.findall(r"^Error: .*", errors, re.MULTILINE)
        self.assertIn("Stage 1 has failed", message)
        self.assertIn(processes[1].address, message)
        self.assertNotIn("Traceback", errors)

    def test_several_hosts(self):
        shared, alone = self.make_directory(), self.make_directory()
        # An initial weight that is rounded the other way changes the state by
        # 2e-4, and with the default learning rate by 0.4.
        flags = ["--num_micro_batches=4", "--learning_rate=1e-4"]
        hosts = self.hosts([shared] * 2, *flags)
        outputs = [self.finish(host) for host in hosts]
        # Only the first host prints and writes.
        self.assertIn("Training 2 stages", outputs[0])
        self.assertNotIn("Training 2 stages", outputs[1])
        self.assertLen(list((shared / "logs").rglob("events.*")), 1)
        # Two replicas in one process, whose layers normalise alike, end the
        # same.
        self.finish(
            trainer(
                alone,
                "--strategy=mirrored",
                "--num_replicas=2",
                *flags,
            )
        )
        self.assert_same_state(
            state(shared), state(alone), rtol=1e-3, atol=1e-3
        )
        # A run without replicas goes on from there.
        output = self.finish(trainer(alone, "--num_epochs=3"))
        self.assertIn("Resuming: 2 epochs of 3 are done.", output)

    def test_signal_to_one_of_several_hosts(self):
        workdir = self.make_directory()
        hosts = self.hosts([workdir] * 2, "--num_epochs=50")
        wait_for_step(hosts[0], 3)
        hosts[1].send_signal(signal.SIGTERM)
        for host in hosts:
            _, errors = host.communicate()
            self.assertEqual(host.returncode, 128 + signal.SIGTERM, errors)
        path = max((workdir / "checkpoints").glob("epoch*"))
        self.assertRegex(path.name, r"^epoch_\d{5}(_step_\d{6})?$")

    def test_hosts_that_do_not_share_a_directory(self):
        directories = [self.make_directory() for _ in range(3)]
        # Of the second host, the number is also the mean.
        for epochs, directory in enumerate(directories, start=1):
            (directory / "checkpoints" / f"epoch_{epochs:05}").mkdir(
                parents=True
            )
        hosts = self.hosts(directories, "--batch_size=129")
        for host in hosts:
            _, errors = host.communicate()
            self.assertEqual(host.returncode, 1)
            self.assertIn(
                "--workdir must be a directory that they share", errors
            )


if __name__ == "__main__":
    tf.test.main()
