"""Tries the families of `keras.applications` as pipelines, and prints a table.

    python -m tools.applications [--json] [--models=VGG,ResNet] [--timeout=600]

Each family has a process of its own, one after another. Results are kept in
build/applications.jsonl, and families in it are not tried again: a command that
was stopped continues.
"""

import sys

from tools import model_trials
from tools.applications import table

# The smallest member of each family, and an image size that it accepts.
SIZES = {
    "ConvNeXtTiny": 32,
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "InceptionResNetV2": 75,
    "InceptionV3": 75,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "NASNetMobile": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "VGG16": 32,
    "Xception": 71,
}


def models():
    """Returns pairs of a member's name and its image size, as strings."""
    return [(name, str(size)) for name, size in SIZES.items()]


main = model_trials.command(
    __doc__,
    models,
    "tools.applications.trial",
    model_trials.BUILD / "applications.jsonl",
    table.markdown,
)

if __name__ == "__main__":
    sys.exit(main())
