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

import keras
from absl import flags

from tf_gpipe.commands.flags import keyword_arguments
from trainers import command_line
from trainers import job_config
from trainers import optimization
from trainers import sentence_pairs
from trainers import token_batches
from trainers import token_pairs
from trainers import translation_evaluation
from trainers.command_line import UserError
from trainers.command_line import chosen
from trainers.command_line import from_flags
from trainers.command_line import parsed
from trainers.devices import HardwareConfig
from trainers.failures import as_user_errors
from trainers.job import Job
from trainers.job_config import JobConfig
from trainers.job_config import PipelineConfig
from trainers.optimization import Optimization
from trainers.sentence_pairs import SentencePairs
from trainers.token_batches import TokenBatches
from trainers.token_losses import SmoothedCrossentropy
from trainers.token_losses import token_metrics
from trainers.translation_model import TranslationModel
from trainers.translator import Translator
from trainers.vocabulary import Vocabulary
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
# Hyper-parameters of `transformer_nmt`, small enough for a CPU.
_MODEL_ARGS = {
    "num_layers": 2,
    "ffn_dim": 512,
    "num_heads": 4,
    "dim": 128,
    "head_size": 32,
    "dropout": 0.2,
}
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


def train_and_evaluate(
    config,
    optimization,
    *,
    pairs,
    vocabulary,
    batch_tokens,
    steps_per_epoch,
    max_length,
    num_test_pairs,
    model_args=None,
    temperature=5.0,
    label_smoothing=0.1,
    **search,
):
    """Trains a model, resuming where an earlier run stopped, and tests it.

    Args:
        config: `JobConfig`.
        optimization: `Optimization`.
        pairs: `SentencePairs` to train and to test with.
        vocabulary: Path of the vocabulary.
        batch_tokens: As of `TokenBatches`.
        steps_per_epoch: Positive integer.
        max_length: Positive integer, tokens of a source or a target, beyond
            which pairs are left out of training and translations cut off.
        num_test_pairs: Positive integer, test pairs at most of a direction.
        model_args: Dictionary, hyper-parameters of `transformer_nmt` that
            differ from the default. Defaults to `None`.
        temperature: As of `TokenBatches`. Defaults to `5.0`.
        label_smoothing: Float, of the loss. Defaults to `0.1`.
        **search: `beam_size` and `length_penalty`, as of `Translator`, to
            test with.

    Returns:
        Tuple of the model and a list of `DirectionScores`.

    Raises:
        Stopped: If Ctrl-C or SIGTERM has stopped training.
        UserError: If the arguments do not fit one another, the dataset, the
            vocabulary, the machine or the checkpoint (nothing has been trained
            then), or a worker process has failed, the data is damaged or a
            disk full.
    """
    # `Job` first of all: TensorFlow's devices are fixed once it has started.
    # At most as many micro-batches as a batch can have rows: a pair has at
    # least a token of each sentence.
    num_micro_batches = min(config.num_micro_batches, max(1, batch_tokens // 2))
    config = dataclasses.replace(config, num_micro_batches=num_micro_batches)
    job = Job(
        _for_sentences(config),
        batches={
            "dataset": pairs.datasets,
            "batch_tokens": batch_tokens,
            "steps_per_epoch": steps_per_epoch,
            "max_length": max_length,
            "temperature": temperature,
            "num_replicas": config.num_replicas,
        },
        about={
            "model_args": model_args or {},
            **optimization.of_the_state(),
        },
    )
    # Before the vocabulary: that of an unknown dataset is missing, too.
    pairs.check_names()
    path, vocabulary = vocabulary, Vocabulary.load(vocabulary)
    tokens = token_pairs.tokenise(vocabulary, pairs.texts("train"), max_length)
    num_replicas = job.hardware.num_replicas
    batches = TokenBatches(
        tokens, batch_tokens, temperature, num_replicas, config.seed
    )
    texts = pairs.held_out(num_test_pairs)
    model = TranslationModel(
        vocabulary,
        _hyper_parameters(model_args or {}),
        {direction: len(x) for direction, x in tokens.directions.items()},
    )
    if job.hardware.is_chief:
        _print_data(tokens, batches, max_length)
        if job.workdir and not config.dry_run:
            model.keep(job.workdir, path)
    if config.dry_run:
        plan = job.plan(
            "transformer_nmt",
            {**model.model_args, "vocabulary": vocabulary.size},
            optimization.make(
                config.num_epochs * steps_per_epoch, steps_per_epoch
            ),
            # The rows of a batch of the longest sources and targets.
            max(1, batch_tokens // (2 * max_length) // num_replicas),
            max_length,
        )
        print(plan, end="")
        return None, []
    # After loading the data: to prepare a dataset draws random numbers.
    keras.utils.set_random_seed(config.seed)
    network = _build(
        job,
        optimization,
        model,
        label_smoothing,
        steps_per_epoch,
        rows=max(1, batch_tokens // (2 * max_length)),
        length=max_length,
    )
    validation_batches = None
    if config.validate_every:
        found = token_pairs.tokenise(
            vocabulary,
            sentence_pairs.chunks(pairs.held_out(num_test_pairs, "validation")),
        )
        validation_batches = token_batches.each_once(
            found, found.indices(), batch_tokens, num_replicas
        )
    job.fit(
        network,
        lambda first, last: batches.epochs(first, last, steps_per_epoch),
        steps_per_epoch,
        batch=f"up to {batch_tokens} tokens",
        validation_batches=validation_batches,
    )
    translator = Translator(network, vocabulary, max_length, **search)
    scores = translation_evaluation.evaluate(
        job, network, model, texts, batch_tokens, translator
    )
    return network, scores


def evaluate(
    config,
    optimization,
    *,
    pairs,
    batch_tokens,
    num_test_pairs,
    label_smoothing=0.1,
    **search,
):
    """Tests the model in the working directory.

    Args:
        config: `JobConfig`.
        optimization: `Optimization` that the model was trained with.
        pairs: `SentencePairs` to test with.
        batch_tokens: As of `train_and_evaluate`, and so are the others.
        num_test_pairs: See `batch_tokens`.
        label_smoothing: See `batch_tokens`.
        **search: `max_length`, `beam_size` and `length_penalty`, as of
            `Translator`.

    Returns:
        List of `DirectionScores`.

    Raises:
        UserError: If there is no such model, or the arguments do not fit it.
    """
    job = Job(_for_sentences(config))
    model = TranslationModel.load(config.workdir)
    model.check_languages(pairs.languages or [])
    texts = pairs.held_out(num_test_pairs)
    network = _build(job, optimization, model, label_smoothing)
    translator = Translator(network, model.vocabulary, **search)
    return translation_evaluation.evaluate(
        job, network, model, texts, batch_tokens, translator
    )


def translate(config, optimization, *, texts, language, **search):
    """Translates with the model in the working directory.

    Args:
        config: `JobConfig`.
        optimization: `Optimization` that the model was trained with.
        texts: List of strings.
        language: String, the language to translate into. `None` is enough if
            the model translates into one only.
        **search: `max_length`, `beam_size` and `length_penalty`, as of
            `Translator`.

    Returns:
        List of strings.

    Raises:
        UserError: If there is no such model, or it was not trained to
            translate into this language.
    """
    job = Job(_for_sentences(config))
    model = TranslationModel.load(config.workdir)
    language = model.target(language)
    network = _build(job, optimization, model)
    translator = Translator(network, model.vocabulary, **search)
    with as_user_errors(job.workdir):
        return translator.translate(texts, [language] * len(texts))


def export(config, optimization):
    """Writes the model in the working directory for serving.

    Args:
        config: `JobConfig`.
        optimization: `Optimization` that the model was trained with.

    Returns:
        The path of a SavedModel.

    Raises:
        UserError: If there is no such model.
    """
    job = Job(_for_sentences(config))
    model = TranslationModel.load(config.workdir)
    return job.export(_build(job, optimization, model))


def _for_sentences(config):
    if config.strategy == "tpu":
        raise UserError(
            "Batches of sentences differ in length, and TPUs compile a step "
            "for one shape. Received: --strategy=tpu"
        )
    if config.balance != "flops":
        return config

    def cost(layer, input_shape):
        # The number of weights, each of which is multiplied once a token, but
        # for those that are looked up. The library counts operations only if
        # all lengths are known.
        if isinstance(layer, keras.layers.Embedding) and len(input_shape) == 2:
            return 0
        return layer.count_params()

    return dataclasses.replace(config, balance=cost)


def _hyper_parameters(model_args):
    given = set(model_args) & {"vocabulary", "source_length", "target_length"}
    if given:
        raise UserError(
            "The vocabulary's size and the lengths follow from the data. "
            f"Received in --model_args: {', '.join(sorted(given))}"
        )
    return {**_MODEL_ARGS, **model_args}


def _build(
    job,
    optimization,
    model,
    label_smoothing=0.0,
    steps_per_epoch=1,
    rows=1,
    length=1,
):
    def make():
        optimizer = optimization.make(
            job.config.num_epochs * steps_per_epoch, steps_per_epoch
        )
        network = job.pipelined(
            "transformer_nmt",
            {**model.model_args, "vocabulary": model.vocabulary.size},
            optimizer,
            rows=rows,
            length=length,
        )
        network.compile(
            optimizer,
            SmoothedCrossentropy(label_smoothing),
            metrics=token_metrics(),
        )
        return network

    return job.build(make)


def _print_data(tokens, batches, max_length):
    shares = batches.shares()
    most, least = max(shares, key=shares.get), min(shares, key=shares.get)
    print(
        f"{len(tokens):,} training pairs in {len(shares)} directions take "
        f"{tokens.nbytes / 2**20:.1f} MiB, "
        f"{tokens.nbytes / len(tokens):.0f} bytes a pair; "
        f"{tokens.num_dropped:,} with more than {max_length} tokens are left "
        f"out. In batches {batches.padding():.1%} of the tokens are padding; "
        f"{most} has {shares[most]:.1%} of the pairs, {least} "
        f"{shares[least]:.1%}."
    )


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
            found = translate(
                *configs, texts=texts, language=_TO.value, **search
            )
        for text in found:
            print(" ".join(text.splitlines()))
        return
    if mode == "export":
        print(f"exported to {export(*configs)}")
        return
    common = {
        "pairs": _pairs(),
        "batch_tokens": _BATCH_TOKENS.value,
        "num_test_pairs": _NUM_TEST_PAIRS.value,
        "label_smoothing": flags.FLAGS.label_smoothing,
        **search,
    }
    if mode == "evaluate":
        evaluate(*configs, **common)
        return
    vocabulary = _VOCABULARY.value or vocabulary_path(
        common["pairs"].datasets,
        _VOCABULARY_SIZE.value,
        common["pairs"].data_dir,
    )
    train_and_evaluate(
        *configs,
        vocabulary=vocabulary,
        steps_per_epoch=_STEPS_PER_EPOCH.value,
        model_args=parsed("model_args", keyword_arguments),
        temperature=_TEMPERATURE.value,
        **common,
    )


if __name__ == "__main__":
    command_line.run(main, takes_arguments=True, **_DEFAULTS)
