"""Memory of steps beside the plan, and the paper's Table 1 in real bytes."""

import contextlib
import gc
import io
import json

import keras
import numpy as np
import tensorflow as tf

import model_zoo
from tools.gpu import devices
from tools.gpu.checking import Failed
from tools.gpu.checking import Skipped
from tools.table1 import __main__ as table1
from tools.table1 import measured
from tools.table1 import planned
from tools.table1.published import FAMILIES
from tools.table1.published import ROWS

# Bounds of measured over planned memory. The plan leaves out what operations
# need while they run, and counts tensors twice that TensorFlow merges.
_SHARES = 0.6, 1.4
_SIZES = {
    "transformer_lm": {"num_layers": 8, "dim": 1024, "ffn_dim": 4096},
    "amoebanet_d": {"num_layers": 18, "num_filters": 128},
}
_TINY = {
    "num_layers": 2,
    "dim": 16,
    "ffn_dim": 32,
    "num_heads": 2,
    "vocabulary": 20,
    "length": 8,
}
# Rows of a micro-batch; the paper's mini-batch has 128.
_MICRO_BATCH_SIZE = 2


def plan_against_measured(cpu, name):
    """Compares each device's peak memory with the plan, for K from 1 to 8.

    Args:
        cpu: See `checking.Check`.
        name: String, a key of `FAMILIES`.
    """
    if cpu and name == "amoebanet_d":
        raise Skipped("takes a minute to trace; transformer_lm is run")
    names = devices.start(cpu)
    family = FAMILIES[name]
    sizes, batch_size = (_TINY, 4) if cpu else (_SIZES[name], 32)
    rows = []
    for num_stages in (2,) if cpu else (1, 2, 4, 8):
        options = {
            "num_stages": num_stages,
            "num_micro_batches": 2 if cpu else 16,
            "remat": "always",
            "balance": "flops",
        }
        layers = model_zoo.get(name, **sizes)
        plan = planned.plan(layers, family, batch_size, **options)
        row = {"num_stages": num_stages, "planned": plan.device_bytes}
        rows.append(row)
        layers = model_zoo.get(name, **sizes)
        x, y = measured.data(layers, batch_size)
        used = names[:num_stages]
        try:
            model = measured.pipeline(layers, family, used, options)
            if cpu:
                model.train_on_batch(x, y)
            else:
                row["measured"] = measured.device_peaks(model, used, x, y)
        except tf.errors.ResourceExhaustedError as e:
            row["why"] = e.message.splitlines()[0]
        print(row, flush=True)
        # Frees what the model has left on the devices.
        model = layers = None
        keras.backend.clear_session()
        gc.collect()
    if cpu:
        raise Skipped(
            "planned and run, but TensorFlow tells no memory of CPUs",
            rows=rows,
        )
    shares = [
        a / b
        for row in rows
        for a, b in zip(
            row.get("measured", [np.inf]),
            row["planned"],
            strict="measured" in row,
        )
    ]
    value = {"rows": rows, "shares": [round(float(x), 3) for x in shares]}
    if not _SHARES[0] <= min(shares) <= max(shares) <= _SHARES[1]:
        raise Failed("far from the plan", **value)
    return value


def table1_row(cpu, name):
    """Checks that a plan tells whether an AmoebaNet-D fits 8 GiB a device.

    Args:
        cpu: See `checking.Check`.
        name: String, the name of a row of Table 1.
    """
    if cpu:
        raise Skipped("measures the memory of GPUs")
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        table1.main(
            [
                "--run",
                "--model=amoebanet_d",
                f"--micro_batch_size={_MICRO_BATCH_SIZE}",
                "--rows",
                name,
                "--json",
            ]
        )
    print(stdout.getvalue())
    (run,) = json.loads(stdout.getvalue().splitlines()[-1])["runs"]
    # Comes last: a plan starts TensorFlow, after which no GPU can be split.
    (row,) = (x for x in ROWS if (x.model, x.name) == ("amoebanet_d", name))
    plan = planned.plan(
        model_zoo.get(row.model, **row.sizes),
        row.family,
        row.family.batch_size,
        **row.options(_MICRO_BATCH_SIZE),
    )
    fits = max(plan.device_bytes) <= row.family.device_gib * 2**30
    value = {
        **row.sizes,
        "result": run["result"],
        "peaks": run["peaks"],
        "planned": plan.device_bytes,
    }
    if (run["result"] == "fits") != fits:
        raise Failed("the plan says otherwise", **value)
    return value
