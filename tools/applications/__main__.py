"""The table of the families of `keras.applications` as pipelines.

    python -m tools.applications [--json] [--models=VGG,ResNet] [--timeout=600]

A process a family, one after another. What is found is kept in a file, and not
sought again: a command that was stopped goes on where it was.
"""

import sys

from tools import each_model
from tools.applications import table

# The smallest member of each family, with a size of images that it takes.
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
    """Returns the names of members, and the sizes of images."""
    return [(name, str(size)) for name, size in SIZES.items()]


main = each_model.command(
    __doc__,
    models,
    "tools.applications.trial",
    each_model.BUILD / "applications.jsonl",
    table.markdown,
)

if __name__ == "__main__":
    sys.exit(main())
