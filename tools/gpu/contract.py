"""Pipelines have the plain model's numbers: `tools.verify`, model by model."""

import contextlib
import io
import json

import keras

from tools import verify
from tools.gpu import devices
from tools.gpu.checking import Failed

_RESNET = "--model=resnet_small --model_args=num_filters=8,num_blocks=1"
_BOTTLENECKS = "--model=resnet50 --model_args=input_shape=(32,32,3)"
_AMOEBANET = (
    "--model=amoebanet_d --model_args=num_layers=3,num_filters=32,"
    "num_classes=10,input_shape=(32,32,3),num_stem_reductions=0"
)
_LM = (
    "--model=transformer_lm --model_args=num_layers=4,dim=32,ffn_dim=64,"
    "num_heads=4,vocabulary=50,length=16"
)
_NMT = (
    "--model=transformer_nmt --model_args=num_layers=2,ffn_dim=64,"
    "num_heads=2,dim=32,vocabulary=50,head_size=16"
)
_UNET = (
    "--model=unet --model_args=num_blocks=2,num_filters=8,"
    "input_shape=(32,32,3),num_classes=4"
)
# What is also run on a CPU.
SMALL = f"{_RESNET} --num_stages=2 --schedule=gpipe --remat=never"
ALL = (
    f"{_RESNET} --num_stages=2 --schedule=gpipe --remat=never",
    f"{_LM} --num_stages=4 --num_devices=2 --schedule=interleaved",
)
ALL = (
    SMALL,
    f"{_LM} --num_stages=4 --schedule=interleaved --num_devices=2",
    f"{_LM} --num_stages=4 --schedule=zero_bubble --dtype_policy=mixed_float16",
    f"{_RESNET} --num_stages=4 --balance=flops",
    f"{_BOTTLENECKS} --num_stages=8 --remat=except_last",
    f"{_BOTTLENECKS} --num_stages=4 --num_micro_batches=1",
    f"{_AMOEBANET} --num_stages=3 --schedule=zero_bubble",
    f"{_LM} --num_stages=8 --schedule=eager_1f1b --remat=never",
    f"{_LM} --num_stages=1 --dtype_policy=mixed_bfloat16",
    f"{_NMT} --num_stages=4 --optimizer=adamw",
    f"{_NMT} --num_stages=2 --schedule=gpipe --dtype_policy=mixed_bfloat16",
    f"{_UNET} --num_stages=4 --schedule=eager_1f1b",
    f"{_UNET} --num_stages=2 --schedule=zero_bubble --remat=never",
    "--random=12",
)


def contract(cpu):
    """Loss, metrics, gradients, variables, slots and predictions."""
    devices.start(cpu)
    results = {}
    for line in [SMALL] if cpu else ALL:
        keras.backend.clear_session()
        results[line] = _result(line)
    wrong = [line for line, result in results.items() if not result["ok"]]
    if wrong:
        raise Failed(f"{len(wrong)} of {len(results)} differ", results=results)
    return {"models": len(results), "results": results}


def _result(line):
    """Returns what `tools.verify` finds, in short."""
    printed = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            status = verify.main([*line.split(), "--json"])
    except (Exception, SystemExit) as e:
        printed.write(f"{type(e).__name__}: {e}\n")
        return {"ok": False, "why": printed.getvalue().splitlines()[-2:]}
    finally:
        print(line, printed.getvalue(), flush=True)
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
