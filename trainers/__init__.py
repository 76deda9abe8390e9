"""Programs that train models from `model_zoo` with `tf_gpipe`."""

import importlib.util
import sys

# The libraries of the extra "trainers" that the programs import at once.
_LIBRARIES = ("sacrebleu", "sentencepiece", "tensorflow_datasets")

# While `python -m trainers...` looks for the program, which then imports
# TensorFlow: it logs at its start what it has found.
if sys.argv[0] == "-m":
    _missing = [x for x in _LIBRARIES if importlib.util.find_spec(x) is None]
    if _missing:
        sys.exit(
            f"The trainers need {', '.join(_missing)}. Install what they need, "
            "in a checkout, with: pip install '.[trainers]'"
        )
    from tools import quiet

    quiet.import_tensorflow()
