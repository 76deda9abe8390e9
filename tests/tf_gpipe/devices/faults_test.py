"""Nothing waits for ever if a worker is killed or stopped at any moment."""

import json
import os
import signal
import subprocess
import time

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from tests import pairwise
from tests import quick_python
from tools import child_process

MOMENTS = (
    "before_model",
    "while_built",
    "while_speeds_are_measured",
    "while_layers_are_measured",
    "in_tune",
    "before_fit",
    "while_traced",
    "in_step",
    "between_epochs",
    "in_timeline",
    "in_fit",
    "in_evaluate",
    "in_predict",
    "in_train_on_batch",
    "in_get_weights",
    "in_set_weights",
    "in_save_weights",
    "in_save_weights_again",
    "in_save",
    "in_load_weights",
    "in_call",
    "in_loss_and_gradients",
    "in_rebalance",
    "in_verify",
    "in_optimizer",
)
# The moments before which a checkpoint is written.
WITH_CHECKPOINT = ("between_epochs", *MOMENTS[MOMENTS.index("in_fit") :])
HEARTBEAT = 4
# Limits of the contract, far above what it takes.
LIMITS = {"KILL": 15, "STOP": 15 + HEARTBEAT}


def client():
    """Returns the command that runs `faults_client`."""
    return *quick_python.command(), "-m", "tests.tf_gpipe.devices.faults_client"


def run(*args):
    """Runs `faults_client`, and returns the JSON that it prints."""
    result = subprocess.run(
        [*client(), *args],
        capture_output=True,
        text=True,
        timeout=150,
        preexec_fn=child_process.end_with_parent,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


class FaultsTest(parameterized.TestCase):
    def check(self, moment, how):
        told = run(moment, how, str(HEARTBEAT))
        outcomes = [told["outcome"], *told.get("then", ())]
        for each in outcomes:
            self.assertTrue(each["unavailable"], each["message"])
            self.assertLess(each["seconds"], LIMITS[how])
        if moment == "in_optimizer":
            # The error of a variable names no worker: its model is not known.
            outcomes = outcomes[1:]
        outcomes.append(told["other"])
        what = "no longer answers" if how == "KILL" else "has not answered for"
        for each in outcomes:
            self.assertRegex(
                each["message"],
                rf"(Stage 1 has failed: its|The) worker at {told['address']} "
                rf"{what}",
            )
            if moment == "in_save_weights_again":
                # The fault has left this file incomplete.
                self.assertNotIn(told["checkpoint"], each["message"])
            elif moment in WITH_CHECKPOINT and each is not told["other"]:
                self.assertIn(
                    f"the newest checkpoint, {told['checkpoint']}.",
                    each["message"],
                )

    @parameterized.parameters(("while_traced", "STOP"), ("in_step", "KILL"))
    @pytest.mark.slow_after(1)
    def test_some_moments(self, moment, how):
        self.check(moment, how)

    @pytest.mark.slow
    def test_long_work_is_no_silence(self):
        self.assertTrue(run("busy", "STOP", str(HEARTBEAT))["done"])

    @pytest.mark.slow
    def test_stopped_with_its_workers(self):
        """By Ctrl-Z in a terminal, for longer than a worker may be silent."""
        process = subprocess.Popen(
            [*client(), "with_the_client", "STOP", str(HEARTBEAT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=child_process.end_with_parent,
        )
        # All but the heartbeat, which is in a session of its own.
        pids = json.loads(process.stdout.readline())
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(2 * HEARTBEAT)
        output, _ = process.communicate(timeout=60)
        self.assertTrue(json.loads(output.splitlines()[-1])["done"])

    @pytest.mark.slow
    def test_interrupt_where_silence_has_no_limit(self):
        process = subprocess.Popen(
            [*client(), "interrupted", "STOP", "None"],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=child_process.end_with_parent,
        )
        self.assertEqual(process.stdout.readline(), "stopped\n")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        self.assertTrue(json.loads(output.splitlines()[-1])["done"])

    @pairwise.each(moment=MOMENTS, how=("KILL", "STOP"))
    @pytest.mark.slow
    def test_every_moment(self, moment, how):
        self.check(moment, how)


if __name__ == "__main__":
    absltest.main()
