"""Trains, tests and exports a translation model, and translates with it."""

import dataclasses

import keras

from trainers import sentence_pairs
from trainers import token_batches
from trainers import token_pairs
from trainers import translation_evaluation
from trainers.command_line import UserError
from trainers.failures import as_user_errors
from trainers.job import Job
from trainers.token_batches import TokenBatches
from trainers.token_losses import SmoothedCrossentropy
from trainers.token_losses import token_metrics
from trainers.translation_model import TranslationModel
from trainers.translator import Translator
from trainers.vocabulary import Vocabulary

# Hyper-parameters of `transformer_nmt`, small enough for a CPU.
_MODEL_ARGS = {
    "num_layers": 2,
    "ffn_dim": 512,
    "num_heads": 4,
    "dim": 128,
    "head_size": 32,
    "dropout": 0.2,
}


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
