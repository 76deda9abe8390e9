"""A signal ends training, on all hosts at the same step, and validations."""

import signal

import keras
import numpy as np
import tensorflow as tf

from trainers.interruption import StopOnSignal


class StopOnSignalTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1)]
        )
        self.model.compile("sgd", "mse")
        self.steps = {"train": 0, "test": 0}

    def fit(self, stop, later=(), validates=True, **sends):
        """Trains for 3 epochs of 4 steps, each with 4 steps of validation."""

        def count(kind):
            def add(batch, logs=None):
                self.steps[kind] += 1

            return add

        x, y = np.zeros((4, 2)), np.zeros((4, 1))
        with stop:
            self.model.fit(
                *(x, y, 1),
                epochs=3,
                validation_data=(x, y) if validates else None,
                validation_batch_size=1,
                verbose=0,
                callbacks=[
                    keras.callbacks.LambdaCallback(
                        on_train_batch_end=count("train"),
                        on_test_batch_end=count("test"),
                    ),
                    keras.callbacks.LambdaCallback(**sends),
                    stop,
                    *later,
                ],
            )

    def send(self, *arguments, **logs):
        # The second one would end this process.
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            signal.raise_signal(signal.SIGTERM)

    def test_in_training(self):
        stop = StopOnSignal()
        self.fit(stop, on_train_batch_end=self.send)
        self.assertEqual(stop.signal, signal.SIGTERM)
        self.assertEqual(self.steps, {"train": 1, "test": 1})

    def test_in_a_validation(self):
        self.fit(StopOnSignal(), on_test_batch_end=self.send)
        # Training ends within the next epoch: this one is then complete.
        self.assertEqual(self.steps, {"train": 5, "test": 2})

    def test_metrics_of_a_part_of_the_data(self):
        """They are not taken for those of all."""
        for when in ("on_train_batch_end", "on_test_batch_end"):
            seen = []
            later = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs, seen=seen: seen.append(
                    {**logs}
                ),
            )
            later.on_test_end = lambda logs, seen=seen: seen.append({**logs})
            sends = {when: self.send}
            self.fit(StopOnSignal(), later=[later], **sends)
            # Of the validation, then of the epoch.
            self.assertEqual(seen[0], {})
            self.assertEqual(list(seen[1]), ["loss"])

    def test_as_training_ends(self):
        stop = StopOnSignal()
        self.fit(stop, on_train_end=self.send)
        self.assertTrue(stop.is_stopped())
        self.assertEqual(stop.signal, signal.SIGTERM)

    def test_without_validation(self):
        self.fit(StopOnSignal(), validates=False)
        self.fit(StopOnSignal(), validates=False, on_epoch_end=self.send)
        self.assertEqual(self.steps, {"train": 12 + 5, "test": 0})

    def test_on_another_host(self):
        stop = StopOnSignal(lambda number: [number, signal.SIGINT])
        self.fit(stop)
        self.assertEqual(stop.signal, signal.SIGINT)
        self.assertEqual(self.steps, {"train": 1, "test": 1})

    def test_no_signal(self):
        stop = StopOnSignal()
        self.fit(stop)
        self.assertFalse(stop.signal)
        self.assertEqual(self.steps, {"train": 12, "test": 12})


if __name__ == "__main__":
    tf.test.main()
