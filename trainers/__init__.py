"""Programs that train models from `model_zoo` with `tf_gpipe`."""

import sys

# While `python -m trainers...` looks for the program, which then imports
# TensorFlow: it logs at its start what it has found.
if sys.argv[0] == "-m":
    from tools import quiet

    quiet.import_tensorflow()
