"""tf_gpipe: a worker process of one core for each stage."""

import time

import tf_gpipe
from tf_gpipe.commands import workers
from tools.peers import keras_layers
from tools.peers import program


def main():
    args = program.parse_args(__doc__)
    processes = workers.connected(args.num_stages, one_core=True)
    started = time.perf_counter()
    model = tf_gpipe.PipelinedSequential(
        keras_layers.make(args),
        num_stages=args.num_stages,
        num_micro_batches=args.num_micro_batches,
        balance="flops",
        schedule=args.schedule,
        remat=args.remat,
        devices=[process.device for process in processes],
    )
    train = keras_layers.trained(args, model)
    program.serve(train, started, keras_layers.VERSIONS)


if __name__ == "__main__":
    main()
