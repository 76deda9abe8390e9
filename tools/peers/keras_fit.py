"""Plain Keras: `fit` on one core."""

import os
import time

from tools.peers import program


def main():
    args = program.parse_args(__doc__)
    # Comes before TensorFlow starts its threads, which inherit the affinity.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import keras

    from tools.peers import keras_layers

    started = time.perf_counter()
    model = keras.Sequential(keras_layers.make(args))
    train = keras_layers.trained(args, model)
    program.serve(train, started, keras_layers.VERSIONS)


if __name__ == "__main__":
    main()
