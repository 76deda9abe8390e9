"""Trains a multilingual translation model as a pipeline.

    python -m tools.prepare_data django_messages --vocabulary_size=4000
    python -m trainers.translation --workdir=/tmp/django

trains a small Transformer, in two stages, to translate the messages of Django
from English into six Slavic languages in Cyrillic script, and ends with its
scores on messages that it has not seen: loss, BLEU and chrF by language and by
resource group, beside those of copying the source. --languages=all takes all
97 languages; --languages=de,fr others.

    python -m trainers.translation --workdir=/tmp/django \\
        --mode=translate --to=uk "Save and continue editing"

translates with it: texts that are given, or else the lines of standard input.
(--mode=predict is the same.)

    python -m trainers.translation --workdir=/tmp/django \\
        --mode=evaluate --beam_size=4

only tests it, here by beam search, and --mode=export writes a SavedModel for
serving. These modes take the flags that are not
given from the run in the working directory, which has:

    flags.txt         the flags, to repeat the run with --flagfile
    model.json        hyper-parameters, target languages
    vocabulary.model  a copy of the vocabulary
    checkpoints/      the newest two, from which the same command goes on:
                      of each epoch, each --checkpoint_every_steps, and
                      where Ctrl-C has stopped the run
    losses.csv        the loss of every step
    run.json          the flags that must stay; see docs/guides/trainers.md
    logs/             for TensorBoard
    scores.json       the scores of the last evaluation
    scores.png        BLEU and chrF against training pairs

Datasets are those of TFDS that have features `language`, `source` in English
and `target`, or are of the kind `tfds.features.Translation`, as are
`wmt16_translate/de-en` and those of `opus`. Several, with commas, are taken
together. The source begins with a token that tells the target's language, and
all languages share a vocabulary, which `tools.prepare_data` makes.

A direction with n training pairs gets n ** (1 / --temperature) of the batches,
in proportion. Resource groups are thirds of the languages by training pairs:
high, middle, low.

The model is `transformer_nmt` of `model_zoo`, by default with num_layers=2,
ffn_dim=512, num_heads=4, dim=128, head_size=32 and dropout=0.2. --model_args
changes any of these: the GPipe paper's T(6, 8192, 16) is
--model_args=num_layers=6,ffn_dim=8192,num_heads=16,dim=1024,head_size=64

Flags for several tasks are in trainers/recipes, with results. Flags for more
hardware are those of trainers.image_classification.
"""

import contextlib
import dataclasses
import pathlib
import sys

from absl import flags

from tf_gpipe.commands.flags import keyword_arguments
from trainers import command_line
from trainers import job_config
from trainers import optimization
from trainers import sentence_pairs
from trainers import translation_runs
from trainers.command_line import UserError
from trainers.command_line import chosen
from trainers.command_line import from_flags
from trainers.command_line import parsed
from trainers.devices import HardwareConfig
from trainers.job_config import JobConfig
from trainers.job_config import PipelineConfig
from trainers.optimization import Optimization
from trainers.sentence_pairs import SentencePairs
from trainers.vocabulary import vocabulary_path

# Defaults of flags that other trainers have, too, as in
# recipes/translation_django.cfg.
_DEFAULTS = {
    "dataset": "django_messages",
    "num_micro_batches": 2,
    "balance": "flops",
    "remat": "never",
    "num_epochs": 6,
    "optimizer": "adam",
    "optimizer_args": "beta_2=0.98",
    "learning_rate": 0.002,
    "warmup_steps": 200,
    "label_smoothing": 0.1,
}
# Related languages, which one small model can learn in minutes.
_SLAVIC = ["be", "bg", "mk", "ru", "sr", "uk"]
_MODES = ("train", "evaluate", "translate", "predict", "export")
_TO = flags.DEFINE_string(
    "to", None, "Language to translate into, with --mode=translate."
)
_VOCABULARY = flags.DEFINE_string(
    "vocabulary",
    None,
    "Path of the vocabulary. Default: that of tools.prepare_data for "
    "--dataset and --vocabulary_size.",
)
_VOCABULARY_SIZE = flags.DEFINE_integer(
    "vocabulary_size", 4000, "Word pieces of the vocabulary.", lower_bound=1
)
_DIRECTIONS = flags.DEFINE_enum(
    "directions",
    "en-x",
    sentence_pairs.DIRECTIONS,
    "Whether to translate from English, into English, or both.",
)
_LANGUAGES = flags.DEFINE_list(
    "languages",
    None,
    "Languages other than English: de,fr,... or all. Default: six Slavic ones "
    "of django_messages, all of other datasets.",
)
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length",
    64,
    "Tokens of a source or a target: longer training pairs are left out, and "
    "translations are cut off.",
    lower_bound=3,
    upper_bound=2**16,
)
_BATCH_TOKENS = flags.DEFINE_integer(
    "batch_tokens",
    512,
    "Tokens of a mini-batch, sources and targets with their padding, over all "
    "replicas.",
    lower_bound=1,
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    5.0,
    "How much more often languages with few pairs are drawn: 1 for "
    "proportionally, 1e9 for all languages alike.",
    lower_bound=1.0,
)
_STEPS_PER_EPOCH = flags.DEFINE_integer(
    "steps_per_epoch",
    1000,
    "Batches that are called an epoch.",
    lower_bound=1,
    upper_bound=2**31 - 1,
)
_NUM_TEST_PAIRS = flags.DEFINE_integer(
    "num_test_pairs",
    100,
    "Pairs of a direction to evaluate with, at most.",
    lower_bound=1,
)
_BEAM_SIZE = flags.DEFINE_integer(
    "beam_size",
    1,
    "Hypotheses of beam search; 1 is greedy.",
    lower_bound=1,
    upper_bound=256,
)
_LENGTH_PENALTY = flags.DEFINE_float(
    "length_penalty",
    0.6,
    "The larger, the longer the translations of beam search.",
    lower_bound=0.0,
)

flags.adopt_module_key_flags(job_config)
flags.adopt_module_key_flags(optimization)


def _take_flags_of(workdir):
    """Sets flags that are not given to their values in a run's flags.txt."""
    path = pathlib.Path(workdir) / "flags.txt"
    if not path.exists():
        return
    # Not flags of the pipeline and the hardware: the same model may be cut in
    # another way, and run elsewhere.
    others = {"mode", "to", "workdir"} | {
        field.name
        for config in (PipelineConfig, HardwareConfig)
        for field in dataclasses.fields(config)
    }
    try:
        given = flags.FLAGS.read_flags_from_files([f"--flagfile={path}"])
        # A crash of the host may have left a part of it, or nothing.
        whole = given and path.read_text().endswith("\n")
        if not whole or not all(x.startswith("--") for x in given):
            raise flags.Error(
                "it must have a flag on each line, and end with a newline."
            )
        for argument in given:
            name, equals, value = argument.removeprefix("--").partition("=")
            if equals and name not in others:
                flags.FLAGS.set_default(name, value)
    except (flags.Error, OSError, UnicodeError) as error:
        raise UserError(
            f"{path} is damaged, or of another trainer: {error}"
        ) from error


def _pairs():
    languages = _LANGUAGES.value
    if languages is None and flags.FLAGS.dataset == _DEFAULTS["dataset"]:
        languages = _SLAVIC
    elif languages == ["all"]:
        languages = None
    names = flags.FLAGS.dataset.split(",")
    if "" in names or len(set(names)) < len(names):
        raise UserError(
            "--dataset must name each data set once. Received: "
            f"--dataset={flags.FLAGS.dataset}"
        )
    return SentencePairs(
        names,
        flags.FLAGS.data_dir,
        _DIRECTIONS.value,
        languages,
    )


def _lines(file):
    """Returns the lines of a text file; none of `None`, a closed one."""
    try:
        lines = [line.removesuffix("\n") for line in file or ()]
    except UnicodeError as error:
        raise UserError(f"Texts must be in UTF-8. Received: {error}") from error
    command_line.check_utf8("Texts", lines)
    return lines


def main(texts):
    mode = chosen("mode", _MODES)
    # As the image trainer calls it.
    if mode == "predict":
        mode = "translate"
    if mode != "translate" and (texts or _TO.value):
        raise UserError(
            "Texts and --to are for --mode=translate. Received: "
            f"--mode={mode}, --to={_TO.value or ''} {' '.join(texts)}"
        )
    workdir = flags.FLAGS.workdir
    if mode != "train":
        if workdir is None:
            raise UserError(
                f"--mode={mode} needs the --workdir of a training run."
            )
        _take_flags_of(workdir)
    configs = (
        from_flags(JobConfig, flags=flags.FLAGS.flags_into_string()),
        from_flags(Optimization),
    )
    search = {
        "max_length": _MAX_LENGTH.value,
        "beam_size": _BEAM_SIZE.value,
        "length_penalty": _LENGTH_PENALTY.value,
    }
    if mode == "translate":
        texts = texts or _lines(sys.stdin)
        # Messages about devices go to stderr: stdout is for translations.
        with contextlib.redirect_stdout(sys.stderr):
            found = translation_runs.translate(
                *configs, texts=texts, language=_TO.value, **search
            )
        for text in found:
            print(" ".join(text.splitlines()))
        return
    if mode == "export":
        print(f"exported to {translation_runs.export(*configs)}")
        return
    common = {
        "pairs": _pairs(),
        "batch_tokens": _BATCH_TOKENS.value,
        "num_test_pairs": _NUM_TEST_PAIRS.value,
        "label_smoothing": flags.FLAGS.label_smoothing,
        **search,
    }
    if mode == "evaluate":
        translation_runs.evaluate(*configs, **common)
        return
    vocabulary = _VOCABULARY.value or vocabulary_path(
        common["pairs"].datasets,
        _VOCABULARY_SIZE.value,
        common["pairs"].data_dir,
    )
    translation_runs.train_and_evaluate(
        *configs,
        vocabulary=vocabulary,
        steps_per_epoch=_STEPS_PER_EPOCH.value,
        model_args=parsed("model_args", keyword_arguments),
        temperature=_TEMPERATURE.value,
        **common,
    )


if __name__ == "__main__":
    command_line.run(main, takes_arguments=True, **_DEFAULTS)
