"""Repeats, on a small scale, experiments of section 5 of the GPipe paper.

    python -m tools.translation_experiments languages --data_dir=/tmp/data
    python -m tools.translation_experiments depth --data_dir=/tmp/data
    python -m tools.translation_experiments batch --data_dir=/tmp/data

`languages` takes the five languages with the fewest training pairs (among
those with at least 500), and compares one bilingual model per language with a
single model that is trained on them and related languages together: do small
languages gain from others? `depth` compares a deep model with a wide one of as
many parameters, each with and without the two measures that keep deep models
stable: scaled initial values of feed-forward layers, and clipped logits.
`batch` compares three batch sizes, in tokens, with the same total of tokens.

Each run is trainers.translation with a recipe of trainers/recipes and the flags
that are printed, in a directory of its own below --workdir. Repeat the command
to continue a run that was stopped; once all runs are done, it only prints the
table. Further arguments are passed to trainers.translation in every run.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import shlex
import statistics
import sys

from rich.console import Console
from rich.table import Table

from tf_gpipe.commands import workers
from trainers.command_line import UserError
from trainers.sentence_pairs import SentencePairs

_ROOT = pathlib.Path(__file__).parents[1]
_DATASET = "django_messages"
# Fewest training pairs of a language that is taken, and how many are taken.
_MIN_PAIRS = 500
_NUM_LANGUAGES = 5
# Tokens per epoch in the experiment `batch`.
_EPOCH_TOKENS = 2**19
_SCORES = ("loss", "bleu", "chrf", "copy_chrf")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table, and the run that makes its scores.

    Attributes:
        kind: String, the row's label. A kind with several rows gets a row
            with their mean, too.
        run: String, the name of the run's directory. Rows may share a run.
        recipe: String, a file in trainers/recipes.
        flags: List of strings, flags of the run that differ from the recipe.
        languages: List of strings, the languages whose mean is shown.
            Defaults to `None`, for all.
    """

    kind: str
    run: str
    recipe: str
    flags: list[str] = dataclasses.field(default_factory=list)
    languages: list[str] | None = None


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m tools.translation_experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", choices=_EXPERIMENTS)
    parser.add_argument(
        "--data_dir", help="directory of datasets; that of TFDS if not given"
    )
    parser.add_argument(
        "--workdir",
        default="/tmp/translation_experiments",
        help="directory of the runs (default: /tmp/translation_experiments)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on the last line",
    )
    args, flags = parser.parse_known_args(argv)
    if args.data_dir is not None:
        flags = [f"--data_dir={args.data_dir}", *flags]
    try:
        rows = _EXPERIMENTS[args.experiment](args.data_dir)
    except UserError as error:
        sys.exit(f"Error: {error}")
    directory = pathlib.Path(args.workdir) / args.experiment
    found, by_kind = [], collections.defaultdict(list)
    for number, row in enumerate(rows, start=1):
        print(f"Run {number} of {len(rows)}, {row.kind}", file=sys.stderr)
        scores = _scores(row, flags, directory / row.run)
        languages = row.languages or sorted(scores)
        means = _means([scores[language] for language in languages])
        shown = languages if row.languages else ["all"]
        found.append({"run": row.kind, "languages": ",".join(shown), **means})
        by_kind[row.kind].append(means)
    for kind, several in by_kind.items():
        if len(several) > 1:
            means = _means(several)
            found.append({"run": kind, "languages": "mean", **means})
    table = Table("run", "languages", "loss", "BLEU", "chrF", "copied chrF")
    for row in found:
        numbers = [f"{row['loss']:.3f}"]
        numbers += [f"{row[name]:.1f}" for name in _SCORES[1:]]
        table.add_row(row["run"], row["languages"], *numbers)
    Console().print(table)
    if args.json:
        print(json.dumps(found))


def _means(scores):
    return {x: statistics.mean(score[x] for score in scores) for x in _SCORES}


def _languages(data_dir):
    """Returns the rows of bilingual models and of the multilingual model."""
    counts = collections.Counter()
    for direction, sources, _ in SentencePairs([_DATASET], data_dir).texts(
        "train"
    ):
        counts[direction.other] += len(sources)
    enough = [x for x in counts if counts[x] >= _MIN_PAIRS]
    fewest = sorted(enough, key=lambda x: (counts[x], x))[:_NUM_LANGUAGES]
    recipe = "translation_multilingual.cfg"
    print(
        "Training pairs: "
        + ", ".join(f"{language} {counts[language]:,}" for language in fewest)
    )
    # The recipe's epochs are for many languages: too many for one.
    epochs = "--num_epochs=2"
    bilingual = [
        Row(
            "bilingual",
            f"bilingual_{language}",
            recipe,
            [f"--languages={language}", epochs],
            [language],
        )
        for language in fewest
    ]
    multilingual = [
        Row("multilingual", "multilingual", recipe, languages=[language])
        for language in fewest
    ]
    return [*bilingual, *multilingual]


def _depth(data_dir):
    """Returns the rows of deep and wide models, stabilised or not."""
    return [
        Row(
            f"{shape}{name}",
            f"{shape}{name}",
            "translation_depth.cfg",
            [
                f"--model_args={sizes},dim=128,head_size=32,dropout=0.2{arguments}"
            ],
        )
        for name, arguments in (
            ("", ""),
            ("_unstabilised", ",scale_ffn_init=False,logit_clip=None"),
        )
        for shape, sizes in (
            ("deep", "num_layers=6,ffn_dim=256,num_heads=2"),
            ("wide", "num_layers=3,ffn_dim=512,num_heads=4"),
        )
    ]


def _batch(data_dir):
    """Returns the rows of three batch sizes, with the same total of tokens."""
    return [
        Row(
            f"{batch_tokens} tokens",
            f"{batch_tokens}_tokens",
            "translation_batch.cfg",
            [
                f"--batch_tokens={batch_tokens}",
                f"--steps_per_epoch={_EPOCH_TOKENS // batch_tokens}",
                # Grows with the square root of the size, as is usual with Adam.
                f"--learning_rate={0.002 * (batch_tokens / 512) ** 0.5:.4f}",
                f"--warmup_steps={_EPOCH_TOKENS // batch_tokens // 4}",
            ],
        )
        for batch_tokens in (512, 2048, 8192)
    ]


def _scores(row, flags, workdir):
    """Returns a run's scores by language, after training it if need be."""
    path = workdir / "scores.json"
    command = [
        sys.executable,
        "-m",
        "trainers.translation",
        f"--flagfile=trainers/recipes/{row.recipe}",
        f"--workdir={workdir}",
        *row.flags,
        *flags,
    ]
    made = workdir / "command.txt"
    text = shlex.join(["python", *command[1:]])
    if made.exists() and made.read_text() != text:
        sys.exit(
            f"Error: the run in {workdir} was made with other flags: "
            f"{made.read_text()}\nRepeat those, or choose another --workdir. "
            f"Received: {' '.join(flags)}"
        )
    if not path.exists():
        print(text, flush=True)
        status = workers.run_in_foreground(
            [*command, "--verbose=2"], cwd=_ROOT, stdout=sys.stderr
        )
        if status:
            sys.exit(f"Error: the run in {workdir} has failed; see above.")
        made.write_text(text)
    directions = json.loads(path.read_text())["directions"]
    return {x["target"]: x for x in directions}


_EXPERIMENTS = {"languages": _languages, "depth": _depth, "batch": _batch}


if __name__ == "__main__":
    main()
