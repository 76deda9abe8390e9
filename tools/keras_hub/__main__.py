"""Tries KerasHub's models as pipelines, and prints a table.

    python -m tools.keras_hub [--json] [--models=Bert,GPT2] [--timeout=300]

Each model has a process of its own, one after another. Results are kept in
build/keras_hub.jsonl, and models in it are not tried again: a command that was
stopped continues.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tools import model_trials  # noqa: E402
from tools.keras_hub import backbones  # noqa: E402
from tools.keras_hub import table  # noqa: E402


def models():
    """Returns pairs of a backbone and a task, by name.

    The task is `None` if the backbone has none. The first task of each backbone
    comes before all others.
    """
    found = [
        (i, name, getattr(task, "__name__", None))
        for name in backbones.names()
        for i, task in enumerate(backbones.tasks_of(name) or [None])
    ]
    return [x[1:] for x in sorted(found, key=lambda x: min(x[0], 1))]


main = model_trials.command(
    __doc__,
    models,
    "tools.keras_hub.trial",
    model_trials.BUILD / "keras_hub.jsonl",
    table.markdown,
)

if __name__ == "__main__":
    sys.exit(main())
