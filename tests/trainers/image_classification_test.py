import collections
import contextlib
import dataclasses
import errno
import functools
import io
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import flags
from absl.testing import absltest
from absl.testing import flagsaver
from absl.testing import parameterized

import model_zoo
import tf_gpipe
from model_zoo import resnet
from tests import quick_python
from tests.devices import KIND
from tf_gpipe.callbacks import Checkpoint
from tf_gpipe.checkpoints import store
from tf_gpipe.checkpoints.store import Store
from trainers import augmentation
from trainers import command_line
from trainers import devices
from trainers import failures
from trainers import image_classification
from trainers import images
from trainers import job_config
from trainers import optimization
from trainers import translation
from trainers.augmentation import Augmentation
from trainers.command_line import Unavailable
from trainers.command_line import UserError
from trainers.datasets import digits
from trainers.devices import HardwareConfig
from trainers.interruption import Stopped
from trainers.job import Job
from trainers.job_config import JobConfig
from trainers.loss_log import LossLog
from trainers.optimization import Optimization
from trainers.weight_averages import averaged
from trainers.workdir import Workdir


class TinyImages(tfds.core.GeneratorBasedBuilder):
    """24 colour images to train on, and 7 in a split of another name."""

    VERSION = tfds.core.Version("1.0.0")
    SHAPE = (6, 5, 3)
    NUM_CLASSES = 3
    DTYPE = np.uint8

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(
                        shape=self.SHAPE, dtype=self.DTYPE
                    ),
                    "label": tfds.features.ClassLabel(
                        num_classes=self.NUM_CLASSES
                    ),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        return {
            "train": self._generate_examples(0, 24),
            "validation": self._generate_examples(24, 31),
        }

    def _generate_examples(self, start, stop):
        for index in range(start, stop):
            image = np.random.default_rng(index).integers(0, 256, (6, 5, 3))
            label = index % self.NUM_CLASSES
            yield index, {"image": image.astype(self.DTYPE), "label": label}


class TinyImagesOfAnyShape(TinyImages):
    SHAPE = (None, None, 3)


class TinyImagesOfTwoClasses(TinyImages):
    NUM_CLASSES = 2


class TinyImagesOf16Bits(TinyImages):
    DTYPE = np.uint16


class TinyImagesWithoutLabels(TinyImages):
    """Has a split without labels, as competitions have."""

    def _split_generators(self, dl_manager):
        splits = super()._split_generators(dl_manager)
        return {**splits, "test": self._without_labels()}

    def _without_labels(self):
        for index, example in self._generate_examples(31, 34):
            yield index, {**example, "label": -1}


class TinyImagesNotToTestWith(TinyImagesWithoutLabels):
    def _split_generators(self, dl_manager):
        splits = super()._split_generators(dl_manager)
        del splits["validation"]
        return splits


class TinyImagesOfOneClass(TinyImages):
    NUM_CLASSES = 1


class TinyImagesOfAnyChannels(TinyImages):
    SHAPE = (None, None, None)


class TinyImagesPartlyLabelled(TinyImages):
    """The last training images have no labels."""

    def _generate_examples(self, start, stop):
        for index, example in super()._generate_examples(start, stop):
            label = -1 if 20 <= index < 24 else example["label"]
            yield index, {**example, "label": label}


class NoImages(TinyImages):
    def _generate_examples(self, start, stop):
        return iter(())


@contextlib.contextmanager
def _signal_after(calls):
    """Sends SIGTERM to this process after so many training steps."""
    count = 0
    # This callback is always there, with a working directory or without.
    before = failures.NotANumber.on_train_batch_end

    def send(self, batch, logs=None):
        nonlocal count
        before(self, batch, logs)
        count += 1
        if count == calls:
            signal.raise_signal(signal.SIGTERM)

    with mock.patch.object(failures.NotANumber, "on_train_batch_end", send):
        yield


def _on_full_disk(function, *args, **kwargs):
    """Calls a function that cannot write files of more than 10 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        return function(*args, **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _with_damaged_image(data):
    """Overwrites the first image, and mends the record's checksums."""
    with tempfile.TemporaryDirectory() as directory:
        old = pathlib.Path(directory) / "old"
        old.write_bytes(data)
        new = pathlib.Path(directory) / "new"
        with tf.io.TFRecordWriter(str(new)) as writer:
            for record in tf.data.TFRecordDataset(str(old)):
                writer.write(record.numpy().replace(b"\x89PNG", b"none"))
        return new.read_bytes()


class TestCase(tf.test.TestCase, parameterized.TestCase):
    """Has a directory for datasets, which are prepared once."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.data_dir = directory.name

    def make_directory(self):
        return pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))


class HelpTest(TestCase):
    @parameterized.parameters(
        (image_classification, (job_config, optimization, augmentation)),
        (translation, (job_config, optimization)),
    )
    def test_lists_all_flags(self, trainer, modules):
        defined = flags.FLAGS.flags_by_module_dict()
        wanted = {
            flag.name
            for module in (trainer, *modules)
            for flag in defined[module.__name__]
        }
        shown = flags.FLAGS.get_key_flags_for_module(trainer)
        self.assertEqual({flag.name for flag in shown}, wanted)
        self.assertContainsSubset(["num_stages", "tune", "workdir"], wanted)


class DigitsTest(TestCase):
    def test_splits(self):
        data = tfds.load("digits", data_dir=self.data_dir, as_supervised=True)
        self.assertLen(data["train"], 1442)
        self.assertLen(data["test"], 355)
        pixels, labels = {}, {}
        for split, examples in data.items():
            examples = list(tfds.as_numpy(examples))
            pixels[split] = {image.tobytes() for image, _ in examples}
            labels[split] = collections.Counter(int(y) for _, y in examples)
            for image, _ in examples:
                self.assertEqual(image.shape, (8, 8, 1))
                self.assertEqual(image.dtype, np.uint8)
            self.assertEqual(max(image.max() for image, _ in examples), 255)
        self.assertEmpty(pixels["train"] & pixels["test"])
        for label in range(10):
            num_test = labels["test"][label]
            num_images = num_test + labels["train"][label]
            self.assertEqual(num_test, num_images // 5)

    def test_without_scikit_learn(self):
        with mock.patch.dict(sys.modules, {"sklearn": None}):
            with self.assertRaisesRegex(
                ImportError, r"pip install scikit-learn"
            ):
                digits._load()
            with self.assertRaisesRegex(UserError, "pip install"):
                images.load("digits", self.make_directory())


class ImagesTest(TestCase):
    def test_load(self):
        data = images.load("tiny_images", self.data_dir)
        self.assertEqual(data.num_classes, 3)
        self.assertEqual(data.shape, (6, 5, 3))
        self.assertLen(data.train, 24)
        (x, y), *_ = data.train_batches(24, 0, 1, seed=0)
        self.assertEqual(x.dtype, np.float32)
        self.assertAllInRange(x, 0.0, 1.0)
        self.assertGreater(np.max(x), 0.9)
        self.assertAllEqual(np.sum(y, axis=0), [8, 8, 8])
        batches = list(data.test_batches(4))
        self.assertEqual([len(y) for _, y in batches], [4, 3])
        # The image of index 24 is the first one: decoded, not encoded.
        expected = np.random.default_rng(24).integers(0, 256, (6, 5, 3))
        images_of_test = np.concatenate([x for x, _ in batches])
        distance = np.abs(images_of_test - expected / 255).max((1, 2, 3))
        self.assertLess(distance.min(), 1e-6)

    def test_split_without_labels(self):
        data = images.load("tiny_images_without_labels", self.data_dir)
        self.assertLen(data.test, 7)
        with self.assertRaisesRegex(UserError, "no images to test with"):
            images.load("tiny_images_not_to_test_with", self.data_dir)

    def test_images_of_each_class_follow_from_the_seed(self):
        data = images.load("tiny_images", self.data_dir)

        def chosen(seed):
            train = data.some_of_each_class(2, seed).train
            return [x for x, _ in train.as_numpy_iterator()]

        first = chosen(3)
        keras.utils.set_random_seed(7)
        self.assertEqual(chosen(3), first)
        self.assertNotEqual(chosen(4), first)

    def test_order_follows_from_seed_and_epoch(self):
        data = images.load("tiny_images", self.data_dir)

        def epochs(first, last, seed=0):
            batches = data.train_batches(10, first, last, seed)
            x = np.stack([x for x, _ in batches.as_numpy_iterator()])
            return x.reshape(last - first, 20, *x.shape[2:])

        whole = epochs(0, 3)
        self.assertAllEqual(whole, epochs(0, 3))
        self.assertAllEqual(whole[1:], epochs(1, 3))
        self.assertNotAllEqual(whole[0], whole[1])
        self.assertNotAllEqual(whole, epochs(0, 3, seed=1))

    def test_augmentation_follows_from_seed_and_epoch(self):
        data = images.load("tiny_images", self.data_dir)
        # The same image all the time, so that its order does not matter.
        data = dataclasses.replace(data, train=data.train.take(1).repeat(24))

        def epoch(number, seed):
            (x, _), *_ = data.train_batches(
                24, number, number + 1, seed, Augmentation(flip=True)
            )
            return x

        first = epoch(0, seed=0)
        self.assertAllEqual(epoch(0, seed=0), first)
        for number, seed in ((1, 0), (0, 1), (0, 2**31 - 2), (0, 2**32 - 1)):
            self.assertNotAllEqual(epoch(number, seed), first)

    @parameterized.parameters(
        ("nonsuch", r"no dataset 'nonsuch'\."),
        ("digit", r"no dataset 'digit'. Did you mean digits\?"),
        ("tiny_images_of_any_shape", "--image_size"),
        ("tiny_images_of16_bits", "Expected images of 8 bits"),
        ("tiny_images_of_one_class", "at least two classes"),
        ("tiny_images_of_any_channels", "a known number of channels"),
    )
    def test_unusable(self, name, message):
        with self.assertRaisesRegex(UserError, message):
            images.load(name, self.data_dir)


class TrainTest(TestCase):
    def setUp(self):
        super().setUp()
        # Quick to trace.
        tiny = functools.partial(
            resnet.resnet_small, num_filters=4, num_blocks=2
        )
        models = mock.patch.dict(model_zoo._MODELS, {"tiny": tiny})
        self.enterContext(models)

    def train(self, **kwargs):
        """Returns the model and what was printed."""
        arguments = {
            "num_micro_batches": 2,
            "num_epochs": 2,
            "verbose": 0,
            "optimizer_args": {"weight_decay": 0.1},
            "learning_rate": 0.01,
            "model": "tiny",
            "dataset": "tiny_images",
            "batch_size": 6,
            "data_dir": self.data_dir,
            **kwargs,
        }
        configs = []
        for cls in (JobConfig, Optimization):
            names = {field.name for field in dataclasses.fields(cls)}
            names &= set(arguments)
            configs.append(cls(**{x: arguments.pop(x) for x in names}))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            model, self.scores = image_classification.train_and_evaluate(
                *configs, **arguments
            )
        return model, printed.getvalue()

    def losses(self, workdir):
        table = np.loadtxt(workdir / "losses.csv", delimiter=",", skiprows=1)
        self.assertAllEqual(table[:, 0], np.arange(len(table)))
        return table[:, 1]

    @pytest.mark.slow
    def test_train_and_evaluate(self):
        workdir = self.make_directory()
        model, printed = self.train(num_epochs=1, workdir=workdir)
        self.assertLen(model.stages, 2)
        self.assertIn(f"2 stages on {KIND}:0, {KIND}:1", printed)
        self.assertIn("batches of 6 images, 2 micro-batches", printed)
        self.assertRegex(
            printed.splitlines()[-1], r"^test accuracy: [01]\.\d{4} \(7 images"
        )
        self.assertBetween(self.scores["accuracy"], 0.0, 1.0)
        self.assertLen(self.losses(workdir), 4)
        self.assertNotEmpty(list(workdir.glob("logs/train/*")))

    @pytest.mark.slow
    def test_tuned(self):
        """A dry run shows the plan; a run keeps it, and another one uses it."""
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        workdir = folder / "run"
        untried = functools.partial(tf_gpipe.tune, budget_seconds=0)
        with mock.patch.object(tf_gpipe, "tune", untried):
            model, text = self.train(tune=True, dry_run=True, workdir=workdir)
        self.assertIsNone(model)
        self.assertIn("next best", text)
        self.assertFalse(workdir.exists())
        model, text = self.train(tune=True, workdir=workdir, num_epochs=1)
        self.assertIn("tried", text)
        plan = tf_gpipe.Plan.load(workdir / "plan.json")
        self.assertEqual(model.balance, plan.arguments["balance"])
        _, shown = self.train(tune=True, dry_run=True, workdir=workdir)
        self.assertEndsWith(shown, str(plan))
        _, text = self.train(tune=True, workdir=workdir)
        self.assertNotIn("tried", text)
        with self.assertRaisesRegex(UserError, "--batch_size was 6, is 4"):
            self.train(tune=True, workdir=workdir, batch_size=4)
        for kwargs, message in (
            ({"strategy": "mirrored"}, "--tune chooses one pipeline"),
            ({"elastic": True, "workers": ["a:1"]}, "--tune --elastic"),
        ):
            with self.assertRaisesRegex(UserError, message):
                self.train(tune=True, **kwargs)

    def test_tuned_for_the_flags(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        plans, policies = [], []

        def tune(model, spec, **kwargs):
            policies.append(model[-1].dtype_policy.name)
            plans.append(tf_gpipe.plan(model, spec, num_stages=2))
            return plans[0]

        options = {"tune": True, "dry_run": True, "workdir": folder}
        with mock.patch.object(tf_gpipe, "tune", tune):
            _, text = self.train(
                **options, dtype_policy="mixed_bfloat16", remat="never"
            )
            self.assertIn("--tune decides in place of --num_micro", text)
            self.assertIn("--remat=never", text)
            self.assertEqual(policies, ["mixed_bfloat16"])
            plans[0].save(folder / "plan.json")
            Workdir(folder).keep(
                {"dtype_policy": "mixed_bfloat16", "batch_size": 6},
                "plan_flags.json",
            )
            with self.assertRaisesRegex(
                UserError,
                "plan.json was chosen for other flags: --dtype_policy was "
                "'mixed_bfloat16', is 'float32'; --batch_size was 6, is 4. ",
            ):
                self.train(**options, batch_size=4)
        self.assertLen(plans, 1)

    @mock.patch.object(Job, "fit", side_effect=UserError("begins"))
    def test_tuned_for_the_data_and_the_optimizer(self, fit):
        workdir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

        def tune(model, spec, **kwargs):
            return tf_gpipe.plan(model, spec, num_stages=2)

        def run(**kwargs):
            self.train(tune=True, workdir=workdir, **kwargs)

        with mock.patch.object(tf_gpipe, "tune", tune):
            for kwargs, message in (
                ({}, "begins"),
                # Of the optimizer's state there is as much.
                ({"learning_rate": 0.1, "num_epochs": 3}, "begins"),
                ({"image_size": 4}, "'input_shape': .6, 5, 3.*.4, 4, 3"),
                (
                    {"dataset": "tiny_images_of_two_classes"},
                    "'num_classes': 3.*is .*'num_classes': 2",
                ),
                ({"optimizer": "sgd"}, "--optimizer was 'adamw', is 'sgd'"),
                ({"ema": 0.9}, "--ema was None, is 0.9"),
            ):
                with self.assertRaisesRegex(UserError, message):
                    run(**kwargs)

    @pytest.mark.slow
    def test_shown_before_and_after(self):
        """Dry run, page, logs, predictions and an exported model."""
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        workdir, page = folder / "run", folder / "step.html"
        model, text = self.train(dry_run=True, workdir=workdir)
        self.assertIsNone(model)
        self.assertEmpty(self.scores)
        self.assertIn("Activations", text)
        self.assertFalse(workdir.exists())
        with self.assertRaisesRegex(UserError, "no checkpoint.*train first"):
            self.train(mode="predict", workdir=workdir)
        self.assertFalse(workdir.exists())
        model, _ = self.train(workdir=workdir, timeline=str(page))
        self.assertIn("newPlot", page.read_text())
        logs = {
            value.tag
            for path in (workdir / "logs" / "train").glob("events*")
            for event in tf.compat.v1.train.summary_iterator(str(path))
            for value in event.summary.value
        }
        self.assertContainsSubset(
            ["epoch_samples_per_second", "epoch_bubble", "epoch_idle_stage_1"],
            logs,
        )
        self.train(mode="predict", workdir=workdir)
        found = np.loadtxt(workdir / "predictions.csv", delimiter=",")
        self.assertAllClose(found.sum(axis=1), np.ones(len(found)), atol=1e-4)
        self.train(mode="export", workdir=workdir)

        def export_on_full_disk(model, path, **kwargs):
            path.mkdir()
            (path / "saved_model.pb").write_text("")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        # The one before stays.
        with (
            mock.patch.object(keras.Model, "export", export_on_full_disk),
            self.assertRaisesRegex(UserError, "Cannot write to .*No space"),
        ):
            self.train(mode="export", workdir=workdir)
        exported = tf.saved_model.load(workdir / "export")
        x = np.ones((2, *model.input_shape[1:]), "float32")
        self.assertAllClose(
            exported.serve(x), model(x, training=False), atol=1e-4
        )

    @pytest.mark.slow
    def test_number_of_stages_does_not_matter(self):
        curves = []
        for num_stages in (1, 2):
            workdir = self.make_directory()
            self.train(num_stages=num_stages, num_epochs=5, workdir=workdir)
            curves.append(self.losses(workdir))
        self.assertLen(curves[0], 20)
        self.assertNotAllClose(curves[0][0], curves[0][-1])
        self.assertAllClose(curves[0], curves[1], rtol=0, atol=1e-4)

    @pytest.mark.slow
    def test_resumption(self):
        whole_dir, parts_dir = self.make_directory(), self.make_directory()
        # Whether the dataset has been prepared before must not matter.
        images.load("tiny_images", self.data_dir)
        whole, _ = self.train(workdir=whole_dir, data_dir=self.make_directory())

        begin = Checkpoint.on_epoch_begin

        def begin_and_die(self, epoch, logs=None):
            begin(self, epoch, logs)
            if epoch == 1:
                raise KeyboardInterrupt

        with mock.patch.object(Checkpoint, "on_epoch_begin", begin_and_die):
            with self.assertRaises(KeyboardInterrupt):
                self.train(workdir=parts_dir)
        # What a run killed while saving leaves behind does no harm.
        (parts_dir / "checkpoints" / "partial").mkdir()
        parts, printed = self.train(workdir=parts_dir)
        self.assertIn("Resuming: 1 epochs of 2 are done.", printed)
        self.assert_same_state(whole, parts)
        self.assertAllEqual(self.losses(whole_dir), self.losses(parts_dir))

        again, printed = self.train(workdir=parts_dir)
        self.assertIn("Only testing.", printed)
        self.assert_same_state(whole, again)
        saved = [p.name for p in (parts_dir / "checkpoints").iterdir()]
        self.assertCountEqual(saved, ["epoch_00001", "epoch_00002"])

    def assert_same_state(self, a, b):
        for x, y in (
            (a.variables, b.variables),
            (a.optimizer.variables, b.optimizer.variables),
        ):
            for v, w in zip(x, y, strict=True):
                self.assertAllEqual(v, w, msg=v.path)

    @pytest.mark.slow
    def test_stopped_within_an_epoch_it_resumes_exactly(self):
        # Everything that is drawn for a step must be drawn again.
        arguments = {
            "num_epochs": 3,
            "ema": 0.9,
            "augmentation": Augmentation("pad", flip=True, mixup=0.2),
            "validate_every": 2,
        }
        whole_dir, parts_dir = self.make_directory(), self.make_directory()
        whole, _ = self.train(workdir=whole_dir, **arguments)
        whole_scores = self.scores
        # An epoch has four steps. The signal comes within the first epoch, then
        # at the end of the second one.
        for calls, name in (
            (2, "epoch_00000_step_000002"),
            (6, "epoch_00002"),
        ):
            with _signal_after(calls), self.assertRaises(Stopped) as caught:
                self.train(workdir=parts_dir, **arguments)
            self.assertEqual(caught.exception.number, signal.SIGTERM)
            self.assertIn(name, str(caught.exception))
            self.assertEqual(
                max(x.name for x in (parts_dir / "checkpoints").iterdir()), name
            )
        parts, printed = self.train(workdir=parts_dir, **arguments)
        self.assertIn("Resuming: 2 epochs of 3 are done.", printed)
        self.assert_same_state(whole, parts)
        self.assertEqual(whole_scores, self.scores)
        self.assertAllEqual(self.losses(whole_dir), self.losses(parts_dir))

    @pytest.mark.slow
    def test_other_batches_within_an_epoch(self):
        workdir = self.make_directory()
        with _signal_after(2), self.assertRaises(Stopped):
            self.train(workdir=workdir)
        for arguments, message in (
            ({"batch_size": 8}, "--batch_size was 6, is 8"),
            ({"seed": 1}, "--seed was 0, is 1"),
            ({"augmentation": Augmentation(flip=True)}, "--flip was False"),
        ):
            with self.assertRaisesRegex(UserError, f"and 2 steps.*{message}"):
                self.train(workdir=workdir, **arguments)
            # Nothing is trained here.
            self.train(workdir=workdir, mode="export", **arguments)

    @pytest.mark.slow
    def test_killed_in_an_evaluation(self):
        """As by a second Ctrl-C, after the first one has saved a checkpoint."""
        whole_dir, parts_dir = self.make_directory(), self.make_directory()
        arguments = {"num_epochs": 1, "validate_every": 1}
        self.train(workdir=whole_dir, **arguments)
        kill = mock.patch.object(
            failures.NotANumber,
            "on_test_begin",
            side_effect=KeyboardInterrupt,
        )
        with _signal_after(2), kill, self.assertRaises(KeyboardInterrupt):
            self.train(workdir=parts_dir, **arguments)
        self.train(workdir=parts_dir, **arguments)
        # Losses are differences of means, which are rounded.
        whole, parts = map(self.losses, (whole_dir, parts_dir))
        self.assertAllClose(whole, parts, rtol=1e-5)

    @pytest.mark.slow
    def test_full_disk(self):
        workdir = self.make_directory()
        whole = self.make_directory()
        self.train(workdir=whole)
        write = Store.write

        def write_on_full_disk(self, position, *args):
            if position.epochs == 1:
                return write(self, position, *args)
            return _on_full_disk(write, self, position, *args)

        with (
            mock.patch.object(Store, "write", write_on_full_disk),
            self.assertRaisesRegex(
                UserError, "Cannot write .*2 epochs.* one is .*epoch_00001"
            ),
        ):
            self.train(workdir=workdir)
        (saved,) = (workdir / "checkpoints").iterdir()
        self.assertEqual(saved.name, "epoch_00001")
        self.train(workdir=workdir)
        self.assertAllEqual(self.losses(whole), self.losses(workdir))

    @parameterized.parameters("mixed_bfloat16", "mixed_float16")
    @pytest.mark.slow_after(1)
    def test_mixed_precision(self, policy):
        model, printed = self.train(
            dataset="digits",
            batch_size=128,
            num_epochs=1,
            dtype_policy=policy,
            validate_every=1,
        )
        self.assertIn(policy, printed)
        self.assertIn(", top 5 ", printed)
        self.assertEqual(model.layers[-1].compute_dtype, policy[6:])
        self.assertEqual(keras.config.dtype_policy().name, "float32")

    @pytest.mark.slow
    def test_stopped_without_workdir(self):
        with _signal_after(1), self.assertRaisesRegex(Stopped, "--workdir"):
            self.train()

    @pytest.mark.slow
    def test_transfer(self):
        source = self.make_directory()
        trained, _ = self.train(workdir=source)

        def name(variable):
            # The path without the model's name.
            return variable.path.partition("/")[2]

        weights = {name(v): v.numpy() for v in trained.variables}
        # More stages, other images, other classes; nothing is trained.
        model, _ = self.train(
            init_from=source,
            dataset="tiny_images_of_two_classes",
            num_stages=3,
            num_epochs=0,
        )
        heads = 0
        for variable in model.variables:
            if "logits" in variable.path:
                heads += 1
            elif "seed" not in variable.path:
                self.assertAllEqual(variable, weights[name(variable)])
        self.assertEqual(heads, 2)
        # With as many classes, the last layer is a new one all the same.
        again, _ = self.train(init_from=source, num_epochs=0, seed=1)
        kernel = next(v for v in again.variables if "logits/k" in v.path)
        self.assertNotAllClose(kernel, weights[name(kernel)])
        # A checkpoint of the run itself takes precedence.
        resumed, _ = self.train(init_from=source, workdir=source)
        self.assert_same_state(trained, resumed)

    @pytest.mark.slow
    def test_transfer_of_averages(self):
        source = self.make_directory()
        trained, _ = self.train(workdir=source, ema=0.5)
        model, _ = self.train(init_from=source, num_epochs=0)
        with averaged(trained):
            for v, w in zip(trained.layers, model.layers, strict=True):
                if v.name != "logits":
                    for a, b in zip(v.weights, w.weights, strict=True):
                        self.assertAllEqual(a, b, msg=a.path)

    def test_transfer_while_a_worker_is_lost(self):
        path = self.make_directory()
        (path / store.INDEX).write_text("")
        lost = tf.errors.UnavailableError(None, None, "Stage 1 has failed.")
        with (
            mock.patch.object(store, "read", side_effect=lost),
            self.assertRaisesRegex(Unavailable, "Stage 1 has failed"),
        ):
            self.train(init_from=path)

    def test_transfer_from_something_else(self):
        for path in ("/nonsuch", str(self.make_directory())):
            with self.assertRaisesRegex(UserError, f"Received: {path}"):
                self.train(init_from=path)
        path = self.make_directory() / "other.weights.h5"
        keras.Sequential([keras.Input((2,)), _dense()]).save_weights(path)
        with self.assertRaisesRegex(UserError, "layers but the last one"):
            self.train(init_from=path)

    def test_loss_that_is_not_a_number(self):
        workdir = self.make_directory()
        with self.assertRaisesRegex(UserError, "loss is nan.*none"):
            self.train(
                workdir=workdir,
                optimizer="sgd",
                optimizer_args={},
                learning_rate=1e30,
            )
        self.assertEmpty(list((workdir / "checkpoints").iterdir()))

    @parameterized.parameters(
        # A damaged record, and a whole record of a damaged image.
        (lambda data: data[:-9] + bytes(9),),
        (_with_damaged_image,),
        (lambda data: b"",),
        (lambda data: bytes(range(256)) * 20,),
    )
    @pytest.mark.slow_after(1)
    def test_damaged_data(self, damage):
        data_dir = self.make_directory()
        images.load("tiny_images", data_dir)
        (record,) = data_dir.glob("*/*/*train.tfrecord*")
        record.write_bytes(damage(record.read_bytes()))
        with self.assertRaisesRegex(UserError, "data set is damaged"):
            self.train(data_dir=data_dir)

    def test_some_images_without_labels(self):
        with self.assertRaisesRegex(UserError, "an image has the label -1"):
            self.train(dataset="tiny_images_partly_labelled")
        data = images.load("tiny_images_partly_labelled", self.data_dir)
        some = data.some_of_each_class(6, seed=0)
        labels = [int(x) for _, x in some.train]
        self.assertEqual(labels, [0] * 6 + [1] * 6 + [2] * 6)

    def test_empty_data(self):
        with self.assertRaisesRegex(UserError, "No examples were yielded"):
            self.train(dataset="no_images")

    @pytest.mark.slow
    def test_images_of_any_size(self):
        model, _ = self.train(
            dataset="tiny_images_of_any_shape", image_size=4, num_epochs=1
        )
        self.assertEqual(model.input_shape, (None, 4, 4, 3))

    def test_checkpoint_of_another_model(self):
        workdir = self.make_directory()
        saved = Checkpoint(workdir / "checkpoints")
        other = tf_gpipe.PipelinedSequential(
            [keras.Input((2,)), _dense()], num_stages=1
        )
        other.compile("adamw", loss="mse")
        zero = np.zeros((1, 1))
        other.fit(
            np.zeros((1, 2)), zero, shuffle=False, verbose=0, callbacks=[saved]
        )
        with self.assertRaisesRegex(UserError, "not one of this model"):
            self.train(workdir=workdir)

    @parameterized.parameters(
        # With as many epochs as are done already; the others have more.
        ({"ema": 0.9, "num_epochs": 1},),
        ({"optimizer": "sgd", "optimizer_args": {}},),
        # Adam's slots have the same shapes as AdamW's.
        ({"optimizer": "adam", "optimizer_args": {}},),
        ({"learning_rate_schedule": "constant"},),
    )
    @pytest.mark.slow_after(1)
    def test_checkpoint_of_another_optimizer(self, others):
        arguments = {
            "workdir": self.make_directory(),
            "learning_rate_schedule": "cosine",
        }
        self.train(num_epochs=1, flags="--as_before", **arguments)
        with self.assertRaisesRegex(UserError, "and its optimizer"):
            self.train(**{**arguments, "flags": "--refused", **others})
        # A run that is refused leaves everything as it was.
        kept = (arguments["workdir"] / "flags.txt").read_text()
        self.assertEqual(kept, "--as_before")

    def test_averages_before_training(self):
        _, printed = self.train(num_epochs=0, ema=0.9)
        self.assertIn("test accuracy", printed)

    def test_what_the_data_tells(self):
        with self.assertRaisesRegex(UserError, "--model_args: num_classes"):
            self.train(model_args={"num_classes": 3})

    @pytest.mark.slow
    def test_damaged_checkpoint(self):
        workdir = self.make_directory()
        self.train(num_epochs=1, workdir=workdir)
        (path,) = (workdir / "checkpoints").iterdir()
        part = path / "part_00000.bin"
        whole = part.read_bytes()
        middle = len(whole) // 2
        for damaged in (
            whole[:1000],
            b"",
            b"\0" * len(whole),
            whole[:middle] + b"\xff" * 2000 + whole[middle + 2000 :],
            bytes(range(256)) * 20,
        ):
            part.write_bytes(damaged)
            with self.assertRaisesRegex(UserError, f"{path} is damaged"):
                self.train(workdir=workdir)
        part.unlink()
        with self.assertRaisesRegex(UserError, f"{path} is damaged"):
            self.train(workdir=workdir)

    @pytest.mark.slow
    def test_checkpoint_of_other_flags(self):
        workdir = self.make_directory()
        self.train(num_epochs=1, workdir=workdir)
        with self.assertRaisesRegex(
            UserError, r"--model_args was \{\}, is \{'num_filters': 8\}"
        ):
            self.train(workdir=workdir, model_args={"num_filters": 8})
        with self.assertRaisesRegex(
            UserError, "--optimizer was 'adamw', is 'sgd'"
        ):
            self.train(workdir=workdir, optimizer="sgd", optimizer_args={})

    @parameterized.parameters(
        ({"num_stages": 3, "balance": [3, 3]}, "balance"),
        ({"model": "transformer_lm"}, "Received: num_classes"),
        (
            {
                "dataset": "digits",
                "model": "unet",
                "model_args": {"num_blocks": 1, "num_filters": 4, "depth": 1},
            },
            "must return a logit for each of the 10 classes",
        ),
        ({"model_args": {"blocks": 3}}, "Received: blocks"),
        ({"batch_size": 25}, "24 training images. Received: batch_size=25"),
        ({"num_stages": 1000}, "1000 devices are needed"),
        ({"num_replicas": 2}, "--strategy=mirrored"),
        ({"restarts": 2}, "--restarts needs a --workdir"),
        ({"checkpoint_every_steps": 3}, "_every_steps needs a --workdir"),
        ({"mode": "export", "dry_run": True}, "leave it or --mode out"),
        ({"strategy": "multi_worker"}, "TF_CONFIG"),
        ({"tpu": "t"}, "--tpu=t needs --strategy=tpu"),
        (
            {"strategy": "mirrored", "workers": ["127.0.0.1:1"]},
            "--workers without --strategy",
        ),
        (
            {"strategy": "mirrored", "num_replicas": 4, "num_stages": 3},
            "12 devices are needed",
        ),
        (
            {"strategy": "mirrored", "num_replicas": 2, "batch_size": 5},
            "batch_size=5, 2 replicas",
        ),
        ({"workers": ["nowhere"]}, "form host:port"),
        ({"elastic": True}, "--elastic needs --workers="),
        ({"worker_timeout": 60.0}, "--worker_timeout needs --workers="),
        ({"worker_heartbeat": 0.0}, "--worker_heartbeat needs --workers="),
        (
            {"workers": ["127.0.0.1:1"], "worker_timeout": 0.1},
            "127.0.0.1:1 within 0.1 seconds.* stage 0 .*checkpoint is none",
        ),
    )
    def test_unfitting_arguments(self, arguments, message):
        with self.assertRaisesRegex(UserError, message):
            self.train(**arguments)


class LossLogTest(TestCase):
    def test_loss_of_each_step(self):
        path = self.make_directory() / "losses.csv"
        model = keras.Sequential([keras.Input((1,)), _dense()])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        x, y = np.zeros((6, 1)), np.array([1.0, 1, 3, 3, 2, 2])[:, None]
        arguments = {
            "batch_size": 2,
            "shuffle": False,
            "verbose": 0,
        }
        arguments["callbacks"] = [LossLog(path, 3)]
        model.fit(x, y, epochs=2, **arguments)
        # A resumed run drops losses that came after the epochs that are done.
        model.fit(x, y * 2, initial_epoch=1, epochs=2, **arguments)
        table = np.loadtxt(path, delimiter=",", skiprows=1)
        self.assertAllClose(
            table, np.transpose([range(6), [1, 9, 4, 4, 36, 16]])
        )

    @parameterized.parameters(
        ("", []),
        ("step,loss\n0,1.0\n1,", [0]),
        ("step,loss\n0,1.0\n\0\0\0\0\0\0", [0]),
        ("0,1.0\n1,1.0\n2,1.", [0, 1]),
        ("step,loss\n0,1.0\n2,1.0\n3,1.0\n4,1.0\n", [0, 2]),
        ("step,loss\n0,-1.5\n1,nan\n2,-inf\n", [0, 1, 2]),
    )
    def test_goes_on_after_a_crash_of_the_host(self, text, kept):
        path = self.make_directory() / "losses.csv"
        path.write_text(text)
        model = keras.Sequential([keras.Input((1,)), _dense()])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        x, logs = np.zeros((6, 1)), [LossLog(path, 3)]
        options = {"batch_size": 2, "verbose": 0, "callbacks": logs}
        model.fit(x, x, initial_epoch=1, epochs=2, **options)
        first, *lines = path.read_text().splitlines()
        self.assertEqual(first, "step,loss")
        steps = [int(x.split(",")[0]) for x in lines]
        self.assertEqual(steps, [*kept, 3, 4, 5])


class DevicesTest(TestCase):
    def test_enough(self):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            devices.ensure(2)
        if not tf.config.list_physical_devices("GPU"):
            self.assertIn("2 logical CPU devices", printed.getvalue())

    @parameterized.parameters(
        # Stages, replicas asked for, shape of a replica, replicas.
        (2, None, [1, 1, 1, 2], 4),
        (4, None, [2, 1, 1, 2], 2),
        (8, None, [2, 2, 1, 2], 1),
        (2, 1, [1, 1, 1, 2], 1),
    )
    def test_tpu(self, num_stages, asked, shape, num_replicas):
        # Four chips of two cores, described by TensorFlow's own class.
        topology = tf.tpu.experimental.Topology(
            mesh_shape=[2, 2, 1, 2],
            device_coordinates=np.array(
                [
                    [
                        [x, y, 0, core]
                        for y in range(2)
                        for x in range(2)
                        for core in range(2)
                    ]
                ]
            ),
        )
        distribute = tf.distribute
        build = tf.tpu.experimental.DeviceAssignment.build
        with (
            mock.patch.object(
                distribute.cluster_resolver, "TPUClusterResolver"
            ) as resolver,
            mock.patch.object(
                tf.tpu.experimental,
                "initialize_tpu_system",
                return_value=topology,
            ),
            mock.patch.object(
                tf.tpu.experimental.DeviceAssignment, "build", wraps=build
            ) as assign,
            mock.patch.object(distribute, "TPUStrategy") as strategy,
        ):
            found = devices.start(num_stages, HardwareConfig("tpu", asked))
            for stages, too_many in ((2, 5), (3, None), (16, None)):
                with self.assertRaisesRegex(UserError, "TPU of 8 cores"):
                    devices.start(stages, HardwareConfig("tpu", too_many))
        resolver.assert_called_with(tpu="local")
        self.assertIs(found.strategy, strategy.return_value)
        self.assertEqual(found.num_replicas, num_replicas)
        _, kwargs = assign.call_args_list[0]
        self.assertEqual(kwargs["computation_shape"], shape)
        _, kwargs = strategy.call_args
        assignment = kwargs["experimental_device_assignment"]
        self.assertEqual(assignment.num_replicas, num_replicas)
        self.assertEqual(assignment.num_cores_per_replica, num_stages)


class CommandLineTest(TestCase):
    def run_main(self, *arguments):
        """Returns the exit code or message of a run that trains nothing."""
        argv = ["image_classification", f"--data_dir={self.data_dir}"]
        argv += ["--dataset=digits"]
        with (
            flagsaver.flagsaver(),
            mock.patch.object(sys, "argv", [*argv, *arguments]),
            mock.patch.object(keras.Model, "fit") as fit,
            self.assertRaises(SystemExit) as caught,
        ):
            command_line.run(image_classification.main)
        fit.assert_not_called()
        return caught.exception.code

    @parameterized.parameters(
        "--model=nonsuch",
        "--dataset=nonsuch",
        "--batch_size=0",
        "--batch_size=5000",
        "--num_epochs=-1",
        "--learning_rate=0",
        "--learning_rate=nan",
        "--worker_timeout=inf",
        "--label_smoothing=nan",
        "--label_smoothing=1",
        "--rand_augment=101",
        "--ema=1",
        "--decay_rate=1e300",
        "--decay_epochs=1e300",
        "--seed=4294967296",
        "--num_epochs=99999999999999999999",
        "--workers=",
        "--workdir=",
        "--optimizer_args=beta_1='a'",
        "--optimizer_args=beta_1=1e999",
        "--model_args=num_blocks=-1",
        "--model_args=num_blocks=1,num_blocks=2",
        "--num_stages=0",
        "--num_micro_batches=0",
        "--num_micro_batches=x",
        "--balance=3,3",
        "--balance=3,x",
        "--schedule=nonsuch",
        "--remat=nonsuch",
        "--workdir=/dev/null/nonsuch",
        "--nonsuch",
        "nonsuch",
    )
    def test_bad_flag(self, argument):
        message = self.run_main(argument)
        self.assertStartsWith(message, "Error: ")
        self.assertNotIn("\n", message)
        name, _, value = argument.lstrip("-").partition("=")
        self.assertIn(value.split(",")[0] or name, message)

    @parameterized.parameters(
        "--workdir=/tmp/a\nb",
        "--model_args=num_blocks=1\n",
        "--optimizer_args=beta_1=0.9,\rbeta_2=0.9",
        "--workers=a:1,b\u2028:2",
    )
    def test_flag_of_several_lines(self, argument):
        """`flags.txt`, which may be a --flagfile, has one a line."""
        name = argument.partition("=")[0]
        self.assertStartsWith(
            self.run_main(argument), f"Error: {name} must be of one line. "
        )

    def test_flagfile_that_is_none(self):
        path = self.make_directory() / "flags.cfg"
        path.write_bytes(bytes(range(256)))
        message = self.run_main(f"--flagfile={path}")
        self.assertStartsWith(message, "Error: a --flagfile must be a text")
        self.assertNotIn("\n", message)

    @pytest.mark.slow
    def test_process(self):
        result = subprocess.run(
            [
                *quick_python.command(),
                "-m",
                "trainers.image_classification",
                f"--data_dir={self.data_dir}",
                "--num_stages=10",
            ],
            cwd=pathlib.Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        self.assertEqual(result.returncode, 1)
        self.assertNotIn("Traceback", result.stderr)
        self.assertRegex(
            result.stderr.splitlines()[-1], "^Error: .*num_stages=10, 9 layers"
        )

    @parameterized.parameters(
        "sacrebleu", "sentencepiece", "tensorflow_datasets"
    )
    def test_library_that_is_not_installed(self, name):
        code = (
            "import runpy, sys\n"
            f"sys.argv = ['-m']; sys.modules[{name!r}] = None\n"
            "runpy.run_module('trainers.image_classification')"
        )
        result = subprocess.run(
            [*quick_python.command(), "-c", code],
            cwd=pathlib.Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        self.assertEqual(result.returncode, 1)
        (line,) = result.stderr.splitlines()
        self.assertRegex(line, rf"need {name}\..* pip install '.\[trainers\]'")

    @parameterized.parameters(
        ([], {"weight_decay": 0.1}),
        (["--optimizer=adamw"], {"weight_decay": 0.1}),
        (["--optimizer=sgd"], {}),
        (["--optimizer_args="], {}),
        (
            ["--optimizer=sgd", "--optimizer_args=momentum=0.5"],
            {"momentum": 0.5},
        ),
    )
    def test_arguments_of_another_optimizer(self, arguments, expected):
        with (
            flagsaver.flagsaver(),
            mock.patch.object(
                sys, "argv", ["image_classification", *arguments]
            ),
            mock.patch.object(
                image_classification, "train_and_evaluate"
            ) as train,
            self.assertRaises(SystemExit),
        ):
            command_line.run(
                image_classification.main, optimizer_args="weight_decay=0.1"
            )
        config, optimization = train.call_args.args
        self.assertEqual(optimization.optimizer_args, expected)
        # So does a run with the flags of flags.txt.
        args = next(
            line
            for line in config.flags.splitlines()
            if line.startswith("--optimizer_args=")
        )
        self.assertEqual(args.partition("=")[2] == "", not expected)

    def test_flags_are_used_and_kept(self):
        workdir = self.make_directory()
        with (
            flagsaver.flagsaver(),
            mock.patch.object(
                image_classification, "train_and_evaluate"
            ) as train,
        ):
            flags.FLAGS(
                [
                    "image_classification",
                    "--balance=4,5",
                    "--seed=3",
                    "--remat=never",
                    f"--workdir={workdir}",
                    "--optimizer_args=weight_decay=0.1",
                    "--crop=pad",
                ]
            )
            image_classification.main()
        config, optimization = train.call_args.args
        self.assertEqual(config.balance, [4, 5])
        self.assertEqual(config.seed, 3)
        self.assertEqual(config.remat, "never")
        self.assertEqual(optimization.optimizer_args, {"weight_decay": 0.1})
        self.assertEqual(train.call_args.kwargs["augmentation"].crop, "pad")
        self.assertIn("--seed=3", config.flags)


def _dense():
    return keras.layers.Dense(1, kernel_initializer="zeros")


if __name__ == "__main__":
    absltest.main()
