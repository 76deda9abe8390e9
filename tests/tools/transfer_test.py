import contextlib
import io
import json
import pathlib
import tempfile

import pytest
import tensorflow as tf

from tools import transfer
from trainers import image_classification
from trainers.job_config import JobConfig
from trainers.optimization import Optimization

RECIPE = """
--dataset=digits
--num_train_per_class=2
--model_args=num_blocks=1,num_filters=4
--num_stages=1
--batch_size=20
--num_epochs=1
"""


@pytest.mark.slow
class TransferTest(tf.test.TestCase):
    def test_gain(self):
        directory = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
        recipe = directory / "recipe.cfg"
        recipe.write_text(RECIPE)
        workdir = directory / "earlier"
        arguments = [f"--recipe={recipe}", "--num_seeds=1", "--json"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            # Trains as the recipe says, but in this process.
            image_classification.train_and_evaluate(
                JobConfig(num_stages=1, num_epochs=1, workdir=workdir),
                Optimization(),
                model="resnet_small",
                model_args={"num_blocks": 1, "num_filters": 4},
                dataset="digits",
                batch_size=20,
                num_train_per_class=2,
            )
            transfer.main([*arguments, f"--init_from={workdir}"])
        found = json.loads(printed.getvalue().splitlines()[-1])
        self.assertEqual(list(found), ["from scratch", "fine-tuned"])
        for values in found.values():
            self.assertLen(values, 1)
            self.assertBetween(values[0], 0.0, 1.0)
        with self.assertRaisesRegex(SystemExit, "^Error: --init_from must be"):
            transfer.main([*arguments, "--init_from=/nonsuch"])
