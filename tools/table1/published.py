"""The published Table 1, with what the paper says about its models."""

import dataclasses
import math
from collections.abc import Callable

import keras

NUM_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Family:
    """What all rows of one model of the zoo have in common.

    Attributes:
        title: String.
        optimizer: Function that returns a Keras optimizer.
        device_gib: Integer, the memory of a device.
        batch_size: Integer, rows of a mini-batch.
        small: Dict, the hyper-parameters for `--run` on a CPU.
        small_batch_size: Integer, the batch size for `--run` on a CPU; large
            enough that activations take most of a process's memory.
    """

    title: str
    optimizer: Callable
    device_gib: int
    batch_size: int
    small: dict
    small_batch_size: int


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of our table, which is a column of the paper's.

    Attributes:
        model: String, a model of the zoo.
        name: String, the paper's name, which contains the number of stages.
        sizes: Dict, hyper-parameters of the model.
        grows: String, the hyper-parameter that the search increases.
        parameters: Float, the published number of parameters.
        parameter_gb: Float, the published memory of parameters.
        activation_gb: Float, the published peak memory of activations.
    """

    model: str
    name: str
    sizes: dict
    grows: str
    parameters: float
    parameter_gb: float
    activation_gb: float

    @property
    def family(self):
        return FAMILIES[self.model]

    @property
    def num_stages(self):
        return int(self.name.partition("-")[2])

    @property
    def naive(self):
        return self.name == "Naive-1"

    @property
    def step(self):
        """The increment of the hyper-parameter that the search increases.

        Transformers grow by a layer for each stage, as in the paper, and
        AmoebaNets by 16 filters, or a layer in each of their three groups.
        """
        if self.grows == "num_filters":
            return 16
        return self.num_stages if self.model == "transformer_lm" else 3

    def options(self, micro_batch_size=None):
        """Returns the row's arguments of a plan or a pipeline."""
        rows = self.family.batch_size if self.naive else micro_batch_size or 1
        return {
            "num_stages": self.num_stages,
            "num_micro_batches": math.ceil(self.family.batch_size / rows),
            "remat": "never" if self.naive else "always",
        }

    def with_size(self, size):
        """Returns the hyper-parameters with another size; `None` for `None`."""
        return None if size is None else {**self.sizes, self.grows: size}


FAMILIES = {
    "amoebanet_d": Family(
        title="AmoebaNet-D",
        optimizer=lambda: keras.optimizers.RMSprop(1e-4, rho=0.9, momentum=0.9),
        device_gib=8,
        batch_size=128,
        small={
            "num_layers": 3,
            "num_filters": 32,
            "num_classes": NUM_CLASSES,
            "input_shape": (32, 32, 3),
            "num_stem_reductions": 0,
        },
        small_batch_size=128,
    ),
    "transformer_lm": Family(
        title="Transformer-L",
        optimizer=lambda: keras.optimizers.Adam(1e-4),
        device_gib=16,
        batch_size=32,
        small={
            "num_layers": 6,
            "dim": 256,
            "ffn_dim": 1024,
            "num_heads": 8,
            "vocabulary": 1000,
            "length": 256,
        },
        small_batch_size=32,
    ),
}


def _amoebanet(name, num_layers, num_filters, grows, *published):
    sizes = {"num_layers": num_layers, "num_filters": num_filters}
    return Row("amoebanet_d", name, sizes, grows, *published)


def _transformer(name, num_layers, *published):
    sizes = {"num_layers": num_layers}
    return Row("transformer_lm", name, sizes, "num_layers", *published)


# AmoebaNets grow as in the paper's table: in filters, then in layers.
ROWS = [
    _amoebanet("Naive-1", 18, 208, "num_filters", 82e6, 1.05, 6.26),
    _amoebanet("Pipeline-1", 18, 416, "num_filters", 318e6, 3.8, 3.46),
    _amoebanet("Pipeline-2", 18, 544, "num_filters", 542e6, 6.45, 8.11),
    _amoebanet("Pipeline-4", 36, 544, "num_layers", 1.05e9, 12.53, 15.21),
    _amoebanet("Pipeline-8", 72, 512, "num_layers", 1.8e9, 24.62, 26.24),
    _transformer("Naive-1", 3, 282.2e6, 11.7, 3.15),
    _transformer("Pipeline-1", 13, 785.8e6, 8.8, 6.4),
    _transformer("Pipeline-8", 103, 5.3e9, 59.5, 50.9),
    _transformer("Pipeline-32", 415, 21.0e9, 235.1, 199.9),
    _transformer("Pipeline-128", 1663, 83.9e9, 937.9, 796.1),
]


def text(sizes):
    """Returns hyper-parameters as the paper writes them: L, or L, D."""
    return ", ".join(map(str, sizes.values()))
