"""Tests a translation model: loss, scores and sample translations."""

import rich.console

from trainers import sentence_pairs
from trainers import token_batches
from trainers import token_pairs
from trainers import translation_scores
from trainers.command_line import UserError
from trainers.failures import as_user_errors
from trainers.translation_scores import DirectionScores

# The number of translations of a direction that are printed.
_SAMPLES = 2


def evaluate(job, network, model, texts, batch_tokens, translator):
    """Tests a model, prints its scores, and saves them in the workdir.

    Every process that trains must call it. Only the chief translates.

    Args:
        job: `Job` of the model.
        network: The Keras model.
        model: Its `TranslationModel`.
        texts: Dictionary that `SentencePairs.held_out` returns. Directions
            that the model was not trained for are ignored.
        batch_tokens: As of `TokenBatches`.
        translator: `Translator` of the model.

    Returns:
        List of `DirectionScores`, one a direction; empty if the process is not
        the chief.

    Raises:
        UserError: If there is nothing to test, or the disk is full.
    """
    texts = {x: texts[x] for x in model.num_train if x in texts}
    if not texts:
        raise UserError(
            "There are no test pairs of what the model translates: "
            f"{', '.join(map(str, model.num_train))}. Use the --dataset, "
            "--directions and --languages that it was trained with."
        )
    tokens = token_pairs.tokenise(
        model.vocabulary, sentence_pairs.chunks(texts)
    )
    metrics = {}
    for direction in texts:
        batches = token_batches.each_once(
            tokens,
            tokens.indices(direction),
            batch_tokens,
            job.hardware.num_replicas,
        )
        metrics[direction] = job.evaluate(network, batches)
    if not job.hardware.is_chief:
        return []
    with as_user_errors(job.workdir):
        translations = _translations(translator, texts)
    groups = translation_scores.resource_groups(
        {
            direction.other: number
            for direction, number in model.num_train.items()
        }
    )
    scores = [
        DirectionScores(
            source=direction.source,
            target=direction.target,
            num_train=model.num_train[direction],
            group=groups[direction.other],
            num_test=len(pairs),
            loss=metrics[direction]["cross_entropy"],
            accuracy=metrics[direction]["accuracy"],
            **translation_scores.corpus_scores(
                translations[direction], pairs, direction.target
            ),
        )
        for direction, pairs in texts.items()
    ]
    untested = [str(x) for x in model.num_train if x not in texts]
    if untested:
        print(f"Without test pairs: {', '.join(untested)}.")
    _print_samples(texts, translations, groups)
    _print_scores(scores)
    if job.workdir:
        _save(scores, job.workdir)
    return scores


def _translations(translator, texts):
    """Returns a dictionary from directions to lists of translations."""
    # In one call, so that sources of similar length share a batch.
    every = [
        (source, direction.target)
        for direction, pairs in texts.items()
        for source, _ in pairs
    ]
    found = iter(translator.translate(*zip(*every, strict=True)))
    return {
        direction: [next(found) for _ in pairs]
        for direction, pairs in texts.items()
    }


def _print_samples(texts, translations, groups):
    """Prints some translations of one direction for each resource group."""
    # Reversed: the last direction that is put into the dictionary stays, and
    # that shall be the first one of its group.
    for direction in {groups[x.other]: x for x in reversed(texts)}.values():
        for (source, reference), translation in list(
            zip(texts[direction], translations[direction], strict=True)
        )[:_SAMPLES]:
            print(
                f"{direction}: {source}\n  reference: {reference}\n"
                f"  model:     {translation}"
            )


def _print_scores(scores):
    console = rich.console.Console(width=100, highlight=False)
    for table in translation_scores.tables(scores):
        console.print(table)
    for name in sorted({x.bleu_signature for x in scores}):
        print(f"BLEU: {name}")
    print(f"chrF: {scores[0].chrf_signature}")


def _save(scores, workdir):
    path, picture = workdir / "scores.json", workdir / "scores.png"
    try:
        translation_scores.save(scores, path)
        translation_scores.draw(scores, picture)
    except ImportError:
        print(f"Saved {path}. A picture needs: pip install matplotlib")
    except OSError as error:
        raise UserError(f"Cannot write to --workdir: {error}") from error
    else:
        print(f"Saved {path} and {picture}.")
