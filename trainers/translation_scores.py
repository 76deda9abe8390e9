"""Scores of translations by language: loss, BLEU and chrF."""

import collections
import dataclasses
import json
import statistics

import rich.table
from sacrebleu.metrics import BLEU
from sacrebleu.metrics import CHRF

from tf_gpipe.schedule import timeline
from tf_gpipe.whole_files import replacing

GROUPS = ("high", "middle", "low")

# sacrebleu's tokenizers for languages without spaces between words. The others
# use its default, as published results do.
_TOKENIZERS = {
    "zh": "zh",
    **dict.fromkeys(("ja", "km", "lo", "my", "th"), "char"),
}


@dataclasses.dataclass(frozen=True)
class DirectionScores:
    """The scores of translations in one direction.

    Attributes:
        source: String, the code of the source's language.
        target: String, the code of the target's language.
        num_train: Integer, the number of training pairs.
        group: `"high"`, `"middle"` or `"low"`: the resource group.
        num_test: Integer, the number of test pairs.
        loss: Float, mean cross-entropy of a token of the references.
        accuracy: Float, the share of the references' tokens that the model
            finds the most likely.
        bleu: Float, BLEU of all translations as a corpus, 0 to 100.
        chrf: Float, chrF, likewise.
        copy_bleu: Float, BLEU of the sources themselves as translations.
        copy_chrf: Float, chrF, likewise.
        bleu_signature: String by which sacrebleu says how BLEU was computed.
        chrf_signature: String, the same for chrF.
    """

    source: str
    target: str
    num_train: int
    group: str
    num_test: int
    loss: float
    accuracy: float
    bleu: float
    chrf: float
    copy_bleu: float
    copy_chrf: float
    bleu_signature: str
    chrf_signature: str


def corpus_scores(translations, pairs, language):
    """Returns BLEU and chrF of translations into a language, by sacrebleu.

    Args:
        translations: List of strings.
        pairs: List of tuples of a source and its reference.
        language: String, the code of the references' language.

    Returns:
        Dictionary of the attributes of `DirectionScores` that begin with
        `bleu`, `chrf` and `copy`.
    """
    sources, references = zip(*pairs, strict=True)
    tokenizer = _TOKENIZERS.get(language.partition("-")[0], "13a")
    scores = {}
    for name, metric in (("bleu", BLEU(tokenize=tokenizer)), ("chrf", CHRF())):
        for prefix, texts in (("", translations), ("copy_", sources)):
            score = metric.corpus_score(list(texts), [list(references)])
            scores[prefix + name] = score.score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


def resource_groups(num_train):
    """Returns the resource group of each language.

    Languages are sorted by their number of training pairs, then by name: the
    first third is high, the second middle and the last low.

    Args:
        num_train: Dictionary from languages to numbers of training pairs.

    Returns:
        Dictionary from languages to one of `GROUPS`.
    """
    order = sorted(num_train, key=lambda name: (-num_train[name], name))
    return {
        name: GROUPS[rank * len(GROUPS) // len(order)]
        for rank, name in enumerate(order)
    }


def means(scores):
    """Returns means of scores over directions, all with the same weight.

    Args:
        scores: List of `DirectionScores`.

    Returns:
        List of dictionaries with `directions`, which is `"en > x"` or
        `"x > en"`; `group`, one of `GROUPS` or `"all"`; `num_languages`; and
        the means of the scores under their names.
    """
    groups = collections.defaultdict(list)
    for score in scores:
        side = "en > x" if score.source == "en" else "x > en"
        groups[side, score.group].append(score)
        groups[side, "all"].append(score)
    order = {name: index for index, name in enumerate((*GROUPS, "all"))}
    return [
        {
            "directions": side,
            "group": group,
            "num_languages": len(groups[side, group]),
            **{
                name: statistics.mean(
                    getattr(score, name) for score in groups[side, group]
                )
                for name in _SCORES
            },
        }
        for side, group in sorted(groups, key=lambda x: (x[0], order[x[1]]))
    ]


# From scores to their headings in tables, where that of copying the source
# follows each score.
_SCORES = {
    "loss": "loss",
    "accuracy": "accuracy",
    "bleu": "BLEU",
    "copy_bleu": "copied",
    "chrf": "chrF",
    "copy_chrf": "copied",
}


def tables(scores):
    """Returns two tables for `rich`: by direction and by resource group.

    The first has the numbers of training and test pairs, too. In both, BLEU
    and chrF are followed by the score of copying the source.

    Args:
        scores: List of `DirectionScores`.
    """
    by_direction = _table("direction", "training", "group", "test")
    for x in sorted(scores, key=lambda x: (x.target == "en", -x.num_train)):
        by_direction.add_row(
            f"{x.source} > {x.target}",
            f"{x.num_train:,}",
            x.group,
            f"{x.num_test:,}",
            *_formatted(dataclasses.asdict(x)),
        )
    by_group = _table("directions", "group", "languages")
    for x in means(scores):
        by_group.add_row(
            x["directions"], x["group"], str(x["num_languages"]), *_formatted(x)
        )
    return by_direction, by_group


def _table(*names):
    table = rich.table.Table()
    for name in (*names, *_SCORES.values()):
        table.add_column(name, justify="right")
    return table


def _formatted(scores):
    return [
        f"{scores[name]:.{3 if name in ('loss', 'accuracy') else 1}f}"
        for name in _SCORES
    ]


def save(scores, path):
    """Writes scores as JSON.

    Args:
        scores: List of `DirectionScores`.
        path: `pathlib.Path`.
    """
    content = {
        "means": means(scores),
        "directions": [dataclasses.asdict(score) for score in scores],
    }
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")


def draw(scores, path):
    """Draws chrF and BLEU against the number of training pairs.

    Args:
        scores: List of `DirectionScores`.
        path: Path of the picture.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib import figure

    picture = figure.Figure(figsize=(10, 4), layout="constrained")
    num_train = [x.num_train for x in scores]
    axes = picture.subplots(1, 2)
    for name, title, ax in zip(
        ("chrf", "bleu"), ("chrF", "BLEU"), axes, strict=True
    ):
        values = [getattr(x, name) for x in scores]
        copied = [getattr(x, f"copy_{name}") for x in scores]
        ax.scatter(num_train, values, s=12, label="model")
        ax.scatter(num_train, copied, s=12, marker="x", label="source copied")
        for x, y, score in zip(num_train, values, scores, strict=True):
            language = score.target if score.source == "en" else score.source
            ax.annotate(language, (x, y), fontsize=6)
        ax.set(
            xlabel="training pairs", ylabel=title, xscale="log", ylim=(0, None)
        )
        ax.legend()
    timeline.save(picture, path)
