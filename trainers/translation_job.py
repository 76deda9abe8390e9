"""Trains, tests and uses a translation model in a pipeline."""

import dataclasses

import keras

from trainers import sentence_pairs
from trainers import token_batches
from trainers import token_pairs
from trainers import translation_evaluation
from trainers.command_line import UserError
from trainers.job import Job
from trainers.token_batches import TokenBatches
from trainers.token_losses import SmoothedCrossentropy
from trainers.token_losses import token_metrics
from trainers.translation_model import TranslationModel
from trainers.translator import Translator
from trainers.vocabulary import Vocabulary

# Of `transformer_nmt`: small enough for a CPU.
_MODEL_ARGS = {
    "num_layers": 2,
    "ffn_dim": 512,
    "num_heads": 4,
    "dim": 128,
    "head_size": 32,
    "dropout": 0.2,
}
# That the data tells.
_OF_THE_DATA = {"vocabulary", "source_length", "target_length"}


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
    beam_size=1,
    length_penalty=0.6,
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
        beam_size: As of `Translator`, to test with.
        length_penalty: As of `Translator`, to test with.

    Returns:
        Tuple of the model and a list of `DirectionScores`.

    Raises:
        Stopped: If Ctrl-C or SIGTERM has stopped training.
        UserError: If the arguments do not fit one another, the dataset, the
            vocabulary, the machine or the checkpoint (nothing has been trained
            then), or a worker process has failed, the data is damaged or a
            disk full.
    """
    # First of all: TensorFlow's devices are fixed once it has started.
    job = Job(_for_sentences(config))
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
        if job.workdir:
            model.keep(job.workdir, path)
    # Only now: preparing a dataset, the first time, draws random numbers too.
    keras.utils.set_random_seed(config.seed)
    network = _build(job, optimization, model, label_smoothing, steps_per_epoch)
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
    translator = Translator(
        network, vocabulary, max_length, beam_size, length_penalty
    )
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
    max_length,
    num_test_pairs,
    label_smoothing=0.1,
    beam_size=1,
    length_penalty=0.6,
):
    """Tests the model in the working directory.

    Args:
        config: `JobConfig`.
        optimization: `Optimization` that the model was trained with.
        pairs: `SentencePairs` to test with.
        batch_tokens: As of `train_and_evaluate`, and so are all others.
        max_length: See `batch_tokens`.
        num_test_pairs: See `batch_tokens`.
        label_smoothing: See `batch_tokens`.
        beam_size: See `batch_tokens`.
        length_penalty: See `batch_tokens`.

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
    translator = Translator(
        network, model.vocabulary, max_length, beam_size, length_penalty
    )
    return translation_evaluation.evaluate(
        job, network, model, texts, batch_tokens, translator
    )


def translate(
    config,
    optimization,
    *,
    texts,
    language,
    max_length,
    beam_size=1,
    length_penalty=0.6,
):
    """Translates with the model in the working directory.

    Args:
        config: `JobConfig`.
        optimization: `Optimization` that the model was trained with.
        texts: List of strings.
        language: String, the language to translate into. `None` is enough if
            the model translates into one only.
        max_length: As of `Translator`, and so are `beam_size` and
            `length_penalty`.
        beam_size: See `max_length`.
        length_penalty: See `max_length`.

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
    translator = Translator(
        network, model.vocabulary, max_length, beam_size, length_penalty
    )
    return translator.translate(texts, [language] * len(texts))


def _for_sentences(config):
    if config.strategy == "tpu":
        raise UserError(
            "Batches of sentences differ in length, and TPUs compile a step "
            "for one shape. Received: --strategy=tpu"
        )
    if config.balance != "flops":
        return config

    def cost(layer, input_shape):
        # The library counts operations only where it knows all lengths. Here
        # each weight is multiplied once a token, but for those looked up.
        if isinstance(layer, keras.layers.Embedding) and len(input_shape) == 2:
            return 0
        return layer.count_params()

    return dataclasses.replace(config, balance=cost)


def _hyper_parameters(model_args):
    given = set(model_args) & _OF_THE_DATA
    if given:
        raise UserError(
            "The vocabulary's size and the lengths follow from the data. "
            f"Received in --model_args: {', '.join(sorted(given))}"
        )
    return {**_MODEL_ARGS, **model_args}


def _build(job, optimization, model, label_smoothing=0.0, steps_per_epoch=1):
    def make():
        network = job.pipelined(
            "transformer_nmt",
            {**model.model_args, "vocabulary": model.vocabulary.size},
        )
        network.compile(
            optimization.make(
                job.config.num_epochs * steps_per_epoch, steps_per_epoch
            ),
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
