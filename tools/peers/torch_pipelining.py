"""torch.distributed.pipelining: two processes over gloo, or one device."""

import datetime
import os
import socket
import subprocess
import sys
import time

import torch
from torch import distributed
from torch.distributed import pipelining

from tools import child_process
from tools.peers import program
from tools.peers import torch_layers

_SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
}
_HOST = "127.0.0.1"
_PORT = "TORCH_PIPELINING_PORT"


def main():
    args = program.parse_args(__doc__)
    versions = {"torch": torch.__version__}
    started = time.perf_counter()
    if args.num_stages == 1:
        model = torch.nn.Sequential(*torch_layers.make(program.layers(args)))
        train = torch_layers.train_on_one_device(args, model)
        program.serve(train, started, versions)
        return
    # The second process is this program again, with the port.
    rank = int(_PORT in os.environ)
    if rank == 0:
        with socket.socket() as s:
            s.bind((_HOST, 0))
            os.environ[_PORT] = str(s.getsockname()[1])
        second = subprocess.Popen(
            [sys.executable, "-m", "tools.peers.torch_pipelining"]
            + sys.argv[1:],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            preexec_fn=child_process.end_with_parent,
        )
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{_HOST}:{os.environ[_PORT]}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(hours=1),
    )
    started = time.perf_counter()
    train = _stage(args, rank)
    num_steps = torch.zeros(1, dtype=torch.long)
    if rank == 1:
        while True:
            distributed.broadcast(num_steps, 0)
            if not num_steps:
                return
            train(int(num_steps))

    def train_both(count):
        num_steps.fill_(count)
        distributed.broadcast(num_steps, 0)
        return train(count)

    program.serve(train_both, started, versions)
    num_steps.fill_(0)
    distributed.broadcast(num_steps, 0)
    second.wait()


def _stage(args, rank):
    """Returns the function that trains this process's stage."""
    wrap = {
        "always": torch_layers.Rematerialized,
        "never": torch.nn.Sequential,
    }[args.remat]
    module = wrap(*torch_layers.make(program.halves(args)[rank]))
    x, y = torch_layers.data(args)
    optimizer = torch.optim.SGD(module.parameters(), lr=program.LEARNING_RATE)
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = _SCHEDULES[args.schedule](
        stage, args.num_micro_batches, loss_fn=torch_layers.loss
    )

    def train(num_steps):
        start, losses = time.perf_counter(), []
        for _ in range(num_steps):
            optimizer.zero_grad()
            losses.clear()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=losses)
            optimizer.step()
        # The first process needs the loss, too; and both end together.
        mean = torch.stack(losses).mean() if rank else torch.zeros(())
        distributed.broadcast(mean, 1)
        return mean.item(), (time.perf_counter() - start) / num_steps

    return train


if __name__ == "__main__":
    main()
