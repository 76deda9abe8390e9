"""Tries the library out on a GPU, and prints a line of JSON for each check.

    {"check": "matrix_product", "status": "ok", "seconds": 3.1, "value": ...}

The most valuable checks come first. Each runs in a process of its own, within
a time limit; a failure leaves the others alone. The exit status is 0 if no
check has failed.

On a GPU nothing is skipped: a check that cannot run has failed. With --cpu,
checks run on logical CPU devices, most of them at a small size; those that need
a GPU are skipped and say why. What checks print goes to standard error.
"""

import argparse
import json
import os
import signal
import sys

from tools.gpu import checking
from tools.gpu.checking import Check

_TABLE1 = ("Pipeline-1", "Pipeline-2", "Pipeline-4", "Pipeline-8", "Naive-1")
_CONTRACT = (
    "resnet_small",
    "transformer_lm",
    "random",
    "unet",
    "transformer_nmt",
    "resnet50",
    "amoebanet_d",
)
CHECKS = (
    *(
        Check(name, f"tools.gpu.foundations:{name}", 120)
        for name in (
            "gpu_seen",
            "matrix_product",
            "convolution",
            "embedding_and_softmax",
            "jit_compile",
            "virtual_devices",
            "trained_step",
        )
    ),
    *(
        Check(f"contract_{name}", "tools.gpu.contract:contract", 240, (name,))
        for name in _CONTRACT
    ),
    *(
        Check(
            f"memory_{name}",
            "tools.gpu.memory:plan_against_measured",
            300,
            (name,),
        )
        for name in ("transformer_lm", "amoebanet_d")
    ),
    *(
        Check(f"table1_{name}", "tools.gpu.memory:table1_row", 300, (name,))
        for name in _TABLE1
    ),
    Check("gemma_2b", "tools.gpu.large_transformer:gemma", 240),
    Check("largest_transformer", "tools.gpu.large_transformer:largest", 240),
    Check("cost_of_a_task", "tools.gpu.costs:task", 120),
    Check("cost_of_a_step", "tools.gpu.costs:step", 240),
    Check("cost_of_stages", "tools.gpu.costs:stages", 240),
    Check("task_times", "tools.gpu.task_times:task_times", 120),
    Check("replicas", "tools.gpu.jobs:replicas", 120),
    Check("trainer", "tools.gpu.jobs:trainer", 240),
    Check("tests", "tools.gpu.jobs:tests", 240),
)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="bash tools/gpu/check.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run small, on logical CPU devices"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[check.name for check in CHECKS],
        metavar="NAME",
        help="only these of " + ", ".join(check.name for check in CHECKS),
    )
    args = parser.parse_args(argv)
    if args.cpu:
        # Hides the GPUs from all processes that this one starts.
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    # An exit, unlike SIGTERM itself, ends the running check as well.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return report(
        [x for x in CHECKS if args.only is None or x.name in args.only],
        args.cpu,
    )


def report(checks, cpu):
    """Runs checks, prints a line for each, and returns the exit status."""
    failed = False
    for check in checks:
        result = checking.run(check, cpu)
        print(json.dumps(result), flush=True)
        failed = failed or result["status"] == "failed"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
