"""Plans a row of Table 1, and searches for the largest size that fits."""

import functools
import math
import sys

import keras

import model_zoo
import tf_gpipe
from tools.table1.published import text

# From bytes a parameter to the function that counts those of a stage.
COUNTS = {
    "12": lambda stage: 12 * stage.parameters,
    "16": lambda stage: stage.parameter_bytes,
}


def plan(layers, family, batch_size, **options):
    """Returns the plan of a model of the zoo for a batch size."""
    first, *layers = layers
    x = first.output
    return tf_gpipe.plan(
        layers,
        keras.KerasTensor((batch_size, *x.shape[1:]), x.dtype),
        optimizer=family.optimizer(),
        **{"balance": "parameters", **options},
    )


def plan_row(row, args):
    """Returns a dict, for JSON, of a row's published and planned numbers."""

    @functools.cache
    def plan_of(size):
        sizes = row.with_size(size)
        print(f"{row.model} {row.name}: {text(sizes)}", file=sys.stderr)
        layers = model_zoo.get(row.model, **sizes)
        return plan(
            layers,
            row.family,
            row.family.batch_size,
            dtype_policy=args.dtype_policy,
            **options,
        )

    options = row.options(args.micro_batch_size)
    device_memory = row.family.device_gib * 2**30
    found = plan_of(row.sizes[row.grows])
    by_bytes = {}
    for name, count in COUNTS.items():

        def fullest(size, count=count):
            stages = plan_of(size).stages
            return max(
                [(count(x), x.activation_bytes) for x in stages], key=sum
            )

        needs = sum(fullest(row.sizes[row.grows]))
        most = largest(row, fullest, device_memory)
        by_bytes[name] = {
            "parameter_bytes": [count(stage) for stage in found.stages],
            "needs": needs,
            "fits": needs <= device_memory,
            "largest": row.with_size(most),
        }
    return {
        "model": row.model,
        "name": row.name,
        "sizes": row.sizes,
        "device_memory": device_memory,
        "dtype_policy": args.dtype_policy,
        **options,
        "paper": {
            "parameters": row.parameters,
            "parameter_gb": row.parameter_gb,
            "activation_gb": row.activation_gb,
        },
        "parameters": sum(stage.parameters for stage in found.stages),
        "activation_bytes": [x.activation_bytes for x in found.stages],
        "by_bytes": by_bytes,
    }


def largest(row, fullest, device_memory):
    """Returns the largest size that fits, or `None`.

    Args:
        row: A `Row`.
        fullest: Function from a size to the bytes of the fullest device, for
            parameters and for activations. As it takes long, each result is
            used to guess the size that just fits.
        device_memory: Integer, bytes.
    """
    start, step = row.sizes[row.grows], row.step
    power = 2 if row.grows == "num_filters" else 1
    # All three count steps: `low` fits, `high` does not.
    number, low, high = start // step, 0, math.inf
    while high - low > 1:
        parameters, activations = fullest(number * step + start % step)
        if parameters + activations <= device_memory:
            low = number
        else:
            high = number

        def fits(guess, number=number, needs=(parameters, activations)):
            ratio = guess / number
            guessed = needs[0] * ratio**power + needs[1] * ratio
            return guessed <= device_memory

        while fits(number + 1):
            number += 1
        while number > 0 and not fits(number):
            number -= 1
        number = min(max(number, low + 1), high - 1)
    return low * step + start % step if low else None
