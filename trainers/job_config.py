"""The options of any training run, and their flags."""

import dataclasses
import pathlib
import re

from absl import flags

from tf_gpipe.schedule import schedules
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import REMAT_MODES
from trainers.command_line import define_flags
from trainers.command_line import setting
from trainers.devices import HardwareConfig


def _balance(text):
    """Returns a list of counts from `"5,4"`; other values unchanged."""
    if text and re.fullmatch(r"\d+(,\d+)*", text):
        return [int(count) for count in text.split(",")]
    return text


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Arguments of `tf_gpipe.PipelinedSequential`. Each field is a flag."""

    num_stages: int = setting(
        2,
        "Pipeline stages, each on a device; two on each with --schedule=zb_v, "
        "v_half and v_min.",
        lower_bound=1,
    )
    num_micro_batches: int = setting(
        8, "Micro-batches of a mini-batch.", lower_bound=1
    )
    balance: str | list[int] | None = setting(
        None,
        "What the stages get equal shares of: flops (the default), parameters, "
        "memory or time; or the number of layers of each stage, as in 5,4.",
        kind=str,
        parse=_balance,
    )
    schedule: str = setting(
        "1f1b",
        "Order of micro-batches.",
        # Without interleaved schedules, which need a number of devices: here a
        # device has one stage, or two if the schedule demands it.
        enum_values=[x for x in schedules.NAMES if "interleaved" not in x],
    )
    remat: str = setting(
        "always",
        "Which micro-batches compute activations again instead of keeping "
        "them; auto: the layers that --memory_limit asks for, of all.",
        enum_values=(*REMAT_MODES, AUTO_REMAT),
    )
    memory_limit: float | None = setting(
        None,
        "What a device may keep with --remat=auto: a share of the activations "
        "that the fullest device keeps with --remat=never.",
        kind=float,
        lower_bound=0,
        upper_bound=1,
    )

    def pipeline_arguments(self):
        """Returns these fields, of a `JobConfig` too, as a dictionary."""
        names = [field.name for field in dataclasses.fields(PipelineConfig)]
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class JobConfig(PipelineConfig, HardwareConfig):
    """The options of any training run.

    Each field is a flag, also the inherited ones, but for `flags`: the text
    that is written to flags.txt in `workdir` when training starts, or `None`
    for no such file.
    """

    tune: bool = setting(
        False,
        "Choose the pipeline, in a minute of measurements and trials, and keep "
        "it in --workdir. That decides in place of --num_micro_batches, "
        "--balance, --schedule, --remat and --memory_limit, which recipes may "
        "give; and of --num_stages, which is a number of devices where there "
        "are neither accelerators nor --workers.",
    )
    dtype_policy: str = setting(
        "float32",
        "Precision of all layers. The mixed ones keep weights in float32.",
        enum_values=("float32", "mixed_bfloat16", "mixed_float16"),
    )
    num_epochs: int = setting(
        20,
        "Epochs in all, those of earlier runs included.",
        lower_bound=0,
        upper_bound=2**31 - 1,
    )
    validate_every: int = setting(
        0,
        "Epochs between two evaluations while training; 0 for none.",
        lower_bound=0,
    )
    seed: int = setting(
        0, "Seed of all randomness.", lower_bound=0, upper_bound=2**32 - 1
    )
    workdir: str | pathlib.Path | None = setting(
        None, "Directory to keep results in and to resume from.", kind=str
    )
    checkpoint_every_steps: int = setting(
        0,
        "Steps between two checkpoints within an epoch; 0 for none but at its "
        "end. Needs --workdir.",
        lower_bound=0,
    )
    timeline: str | None = setting(
        None,
        "File of a page (.html) that shows when each device ran what in a "
        "step. The bubble is then logged, too.",
        kind=str,
    )
    dry_run: bool = setting(
        False, "Show what each stage will need, and train nothing."
    )
    verbose: int = setting(
        1,
        "0: no progress, 1: a progress bar, 2: a line each epoch.",
        lower_bound=0,
        upper_bound=2,
    )
    flags: str | None = None


define_flags(JobConfig)
# Flags whose values and defaults differ by trainer.
flags.DEFINE_string(
    "dataset", None, "Dataset by its name in TFDS; see above for which."
)
flags.DEFINE_string(
    "mode",
    "train",
    "What to do: train, export (a SavedModel for serving, into --workdir), or "
    "what else the trainer does with the model in --workdir; see above.",
)
flags.DEFINE_string(
    "data_dir", None, "Directory of TFDS datasets. Default: that of TFDS."
)
flags.DEFINE_string(
    "model_args",
    "",
    "Hyper-parameters of the model, such as num_blocks=8,num_filters=64.",
)
flags.DEFINE_float(
    "label_smoothing",
    0.0,
    "Share of a label that is spread over all classes, or all tokens.",
    lower_bound=0.0,
)
flags.register_validator(
    "label_smoothing",
    lambda value: value < 1,
    message="should be below 1, at which labels tell nothing",
)
