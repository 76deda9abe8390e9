"""What the programs share: flags, weights, data, and the protocol.

    benchmark                     program
        | <- {"setup_seconds", "losses", "versions"} |
        | "5\n" -------------------------------> |   five steps
        | <----------------- {"seconds", "loss"} |   of a step
        | end of file -------------------------> |   end

Besides the standard library only NumPy is imported: each program runs in its
own library's environment.
"""

import argparse
import json
import sys
import time

import numpy as np

NUM_CLASSES = 10
NUM_BLOCKS = 8
NUM_HEADS = 4
EPSILON = 1e-5
LEARNING_RATE = 1e-3
# Of the Transformer: the length of sequences and the size of embeddings. Of the
# convolutions: the height and width of images, and the number of channels.
LENGTH, WIDTH = 64, 256
SIZE, FILTERS = 32, 32
WORKLOADS = ("transformer", "convolutional")


def parse_args(description):
    """Returns the parsed arguments of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--num_stages", type=int, default=1)
    parser.add_argument("--num_micro_batches", type=int, default=1)
    parser.add_argument("--schedule", default="gpipe")
    parser.add_argument("--remat", default="never")
    parser.add_argument("--batch_size", type=int, default=64)
    return parser.parse_args()


def data(args):
    """Returns a batch of inputs and labels, as NumPy arrays."""
    generator = np.random.default_rng(0)
    if args.workload == "transformer":
        shape, labels = (LENGTH, WIDTH), (LENGTH,)
    else:
        shape, labels = (SIZE, SIZE, 3), ()
    x = generator.standard_normal((args.batch_size, *shape), np.float32)
    y = generator.integers(0, NUM_CLASSES, (args.batch_size, *labels))
    return x, y


def layers(args):
    """Returns the layers, a list of pairs of a kind and the initial weights.

    Kernels have Keras's shapes: (inputs, outputs) and (height, width, inputs,
    outputs).
    """
    generator = np.random.default_rng(1)

    def kernel(*shape):
        values = generator.standard_normal(shape, np.float32)
        return values / np.float32(np.sqrt(np.prod(shape[:-1])))

    def norm(size):
        return [np.ones(size, np.float32), np.zeros(size, np.float32)]

    def dense(inputs, outputs):
        return [kernel(inputs, outputs), np.zeros(outputs, np.float32)]

    def convolution(inputs):
        return [kernel(3, 3, inputs, FILTERS), *norm(FILTERS)]

    def projections():
        return [x for _ in range(4) for x in dense(WIDTH, WIDTH)]

    found = []
    if args.workload == "transformer":
        for _ in range(NUM_BLOCKS):
            found.append(("attention", [*norm(WIDTH), *projections()]))
            inner = dense(WIDTH, 4 * WIDTH), dense(4 * WIDTH, WIDTH)
            found.append(("feed_forward", [*norm(WIDTH), *inner[0], *inner[1]]))
        return [*found, ("dense", dense(WIDTH, NUM_CLASSES))]
    found.append(("convolution", convolution(3)))
    for _ in range(NUM_BLOCKS):
        body = convolution(FILTERS) + convolution(FILTERS)
        found.append(("residual", body))
    return [*found, ("pooled_dense", dense(FILTERS, NUM_CLASSES))]


def halves(args):
    """Returns the layers of each of two stages, cut after half the blocks."""
    found = layers(args)
    # Both models end with a dense layer; that of images starts with another
    # convolution.
    cut = len(found) // 2
    return [found[:cut], found[cut:]]


def serve(train, started, versions):
    """Answers the benchmark until it closes the standard input.

    Args:
        train: Function from a number of steps to a loss (of the last step, or
            the mean) and the mean seconds of a step.
        started: Float, `time.perf_counter()` after all processes had started,
            before the model was built.
        versions: Dict of the libraries' versions.
    """
    losses = [train(1)[0]]
    first = time.perf_counter() - started
    for _ in range(2):
        loss, seconds = train(1)
        losses.append(loss)
    _say(setup_seconds=first - seconds, losses=losses, versions=versions)
    for line in sys.stdin:
        loss, seconds = train(int(line))
        _say(seconds=seconds, loss=loss)


def repeated(step):
    """Returns `train` for `serve`, which repeats a step that returns a loss."""

    def train(num_steps):
        start = time.perf_counter()
        for _ in range(num_steps):
            loss = float(step())
        return loss, (time.perf_counter() - start) / num_steps

    return train


def _say(**message):
    print(json.dumps(message), flush=True)
