"""torchgpipe: one process, two CPU partitions, or one device."""

import time
from importlib import metadata

import torch
import torchgpipe

from tools.peers import program
from tools.peers import torch_layers


def main():
    args = program.parse_args(__doc__)
    started = time.perf_counter()
    model = torch.nn.Sequential(*torch_layers.make(program.layers(args)))
    if args.num_stages > 1:
        model = torchgpipe.GPipe(
            model,
            [len(half) for half in program.halves(args)],
            devices=["cpu"] * args.num_stages,
            chunks=args.num_micro_batches,
            checkpoint=args.remat,
        )
    program.serve(
        torch_layers.train_on_one_device(args, model),
        started,
        {
            "torch": torch.__version__,
            "torchgpipe": metadata.version("torchgpipe"),
        },
    )


if __name__ == "__main__":
    main()
