"""Pipelines compute what plain models do: `verify`, model by model."""

import contextlib
import io
import json

import keras

from tf_gpipe.commands import verify
from tools.gpu import devices
from tools.gpu.checking import Failed
from tools.random_models import __main__ as random_models

_SIZES = {
    "resnet_small": "num_filters=8,num_blocks=1",
    "resnet50": "input_shape=(32,32,3)",
    "amoebanet_d": "num_layers=3,num_filters=32,num_classes=10,"
    "input_shape=(32,32,3),num_stem_reductions=0",
    "transformer_lm": "num_layers=4,dim=32,ffn_dim=64,num_heads=4,"
    "vocabulary=50,length=16",
    "transformer_nmt": "num_layers=2,ffn_dim=64,num_heads=2,dim=32,"
    "vocabulary=50,head_size=16",
    "unet": "num_blocks=2,num_filters=8,input_shape=(32,32,3),num_classes=4",
}
# By model, the flags of each run of `python -m tf_gpipe verify`; for "random",
# those of `tools.random_models`.
RUNS = {
    "resnet_small": (
        "--num_stages=2 --schedule=gpipe --remat=never",
        "--num_stages=4 --balance=flops",
    ),
    # Batch normalization over so few values enlarges float32's rounding errors.
    "resnet50": (
        "--num_stages=8 --remat=except_last --dtype_policy=float64 "
        "--optimizer=sgd",
    ),
    "amoebanet_d": ("--num_stages=3 --schedule=zero_bubble",),
    "transformer_lm": (
        "--num_stages=1 --dtype_policy=mixed_bfloat16 --optimizer=sgd",
        "--num_stages=4 --schedule=interleaved --num_devices=2",
        "--num_stages=4 --schedule=zero_bubble --dtype_policy=mixed_float16 "
        "--optimizer=sgd",
        "--num_stages=8 --schedule=eager_1f1b --remat=never",
    ),
    "transformer_nmt": (
        "--num_stages=4 --optimizer=adamw",
        "--num_stages=2 --schedule=gpipe --dtype_policy=mixed_bfloat16 "
        "--optimizer=sgd",
    ),
    "unet": (
        "--num_stages=4 --schedule=eager_1f1b",
        "--num_stages=2 --schedule=zero_bubble --remat=never",
    ),
    # Random models, recurrent ones among them.
    "random": ("--num=6",),
}


def contract(cpu, model):
    """Compares loss, metrics, gradients, variables, slots and predictions.

    Args:
        cpu: See `checking.Check`.
        model: String, a key of `RUNS`.
    """
    devices.start(cpu)
    command, flags = random_models.main, []
    if model in _SIZES:
        command = verify.main
        flags = [f"--model={model}", f"--model_args={_SIZES[model]}"]
    results = {}
    for run in RUNS[model]:
        keras.backend.clear_session()
        results[run] = _result(command, [*flags, *run.split()])
    wrong = [run for run, result in results.items() if not result["ok"]]
    if wrong:
        raise Failed(f"{len(wrong)} of {len(results)} differ", results=results)
    return {"results": results}


def _result(command, flags):
    """Runs a command that compares models, and returns a short result."""
    printed = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            status = command([*flags, "--json"])
    except (Exception, SystemExit) as e:
        printed.write(f"{type(e).__name__}: {e}\n")
        return {"ok": False, "why": printed.getvalue().splitlines()[-2:]}
    finally:
        print(*flags, printed.getvalue(), flush=True)
    found = json.loads(printed.getvalue().splitlines()[-1])
    if "worst" not in found:
        return {"ok": status == 0, **found}
    worst = found["worst"].values()
    return {
        "ok": status == 0,
        "first_layer": found["first_layer"],
        "problems": found["problems"],
        "difference": max((x["difference"] or 0.0 for x in worst), default=0.0),
    }
