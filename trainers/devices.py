"""The hardware of a trainer: devices of this host, replicas, other hosts."""

import dataclasses
import itertools
import math
import os
from typing import Any

import tensorflow as tf

import tf_gpipe
from tf_gpipe.commands.devices import ensure
from tf_gpipe.devices import placement
from trainers.command_line import UserError
from trainers.command_line import setting

# The least time for which a restarted run waits for missing workers.
_AWAY_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class HardwareConfig:
    """The choice of devices, replicas and workers. Each field is a flag."""

    strategy: str = setting(
        "none",
        "Replicas of the pipeline: none; several on this host; one on each "
        "host of TF_CONFIG; or several on a TPU.",
        enum_values=("none", "mirrored", "multi_worker", "tpu"),
    )
    num_replicas: int | None = setting(
        None,
        "Replicas with --strategy=mirrored or tpu. Default: as many as there "
        "are accelerators for; 2 without any.",
        kind=int,
        lower_bound=1,
    )
    workers: list[str] | None = setting(
        None, "Worker processes to run stages on: host:port,...", kind=list
    )
    worker_timeout: float = setting(
        15.0,
        "Seconds to wait for workers that are missing at the start.",
        lower_bound=0.0,
    )
    worker_heartbeat: float = setting(
        30.0,
        "Seconds for which a worker may be silent before it is taken for "
        "dead. 0: as long as it likes.",
        lower_bound=0.0,
    )
    restarts: int = setting(
        0,
        "How often to start again, and go on from the newest checkpoint, after "
        "a worker is lost or the trainer is killed. It then waits two minutes "
        "for workers that are missing, but with --elastic. Needs --workdir.",
        lower_bound=0,
    )
    elastic: bool = setting(
        False,
        "With --workers: go on upon the workers that answer within "
        "--worker_timeout, at least one of them. Stages then share devices.",
    )
    tpu: str | None = setting(
        None,
        "Name or address of the TPU with --strategy=tpu. Default: this host's.",
        kind=str,
    )


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The strategy and devices that a trainer runs on.

    Attributes:
        strategy: `tf.distribute.Strategy` to build the model under.
        devices: The argument `devices` of `tf_gpipe.PipelinedSequential`.
        num_replicas: Integer, the number of replicas on all hosts.
        is_chief: Boolean, whether this process writes checkpoints and logs.
    """

    strategy: tf.distribute.Strategy
    devices: Any = None
    num_replicas: int = 1
    is_chief: bool = True

    def of_all_hosts(self, number):
        """Returns the integers with which all processes call it, as a list."""
        if not isinstance(
            self.strategy, tf.distribute.MultiWorkerMirroredStrategy
        ):
            return [number]
        found = _gathered(self.strategy, tf.constant(number, tf.float64))
        return [int(x) for x in found]


@tf.function
def _gathered(strategy, number):
    """Returns the numbers of all replicas, in a tensor."""

    def among_zeros(number):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        count = strategy.num_replicas_in_sync
        return number * tf.one_hot(replica, count, dtype=tf.float64)

    mine = strategy.run(among_zeros, (number,))
    return strategy.reduce("SUM", mine, axis=None)


def start(num_devices, config):
    """Prepares the hardware. TensorFlow must not have started.

    Args:
        num_devices: Positive integer, the number of devices of a pipeline,
            and so of each replica.
        config: `HardwareConfig`.

    Returns:
        A `Hardware`.

    Raises:
        UserError, ValueError: If the arguments do not fit one another or the
            machine.
        tf.errors.UnavailableError: If a worker cannot be reached.
    """
    strategy, num_replicas = config.strategy, config.num_replicas
    if config.workers is not None and not config.workers:
        raise UserError(
            "--workers must name a worker: host:port,... Received: --workers="
        )
    default = HardwareConfig()
    for name in ("elastic", "worker_heartbeat", "worker_timeout"):
        given = getattr(config, name) != getattr(default, name)
        if given and not config.workers:
            raise UserError(f"--{name} needs --workers=host:port,...")
    if config.workers and strategy != "none":
        raise UserError(
            "Stages on worker processes form a single pipeline. Use "
            f"--workers without --strategy. Received: --strategy={strategy}"
        )
    if num_replicas not in (None, 1) and strategy not in ("mirrored", "tpu"):
        raise UserError(
            "--num_replicas is for --strategy=mirrored and --strategy=tpu. "
            f"Received: --num_replicas={num_replicas}, --strategy={strategy}"
        )
    if config.tpu is not None and strategy != "tpu":
        raise UserError(
            f"--tpu={config.tpu} needs --strategy=tpu. Received: "
            f"--strategy={strategy}"
        )
    if strategy == "none":
        devices = None
        if config.workers:
            waits = config.restarts and not config.elastic
            devices = tf_gpipe.connect(
                config.workers,
                timeout=max(
                    config.worker_timeout, _AWAY_SECONDS if waits else 0.0
                ),
                heartbeat=config.worker_heartbeat or None,
                at_least=1 if config.elastic else None,
            )
            if config.elastic:
                devices = _shared(devices, num_devices)
        else:
            ensure(num_devices)
        return Hardware(tf.distribute.get_strategy(), devices)
    if strategy == "mirrored":
        return _mirrored(num_devices, num_replicas)
    if strategy == "tpu":
        return _tpu(num_devices, num_replicas, config.tpu)
    return _multi_worker(num_devices)


def _shared(devices, num_devices):
    """Returns `num_devices` devices; if there are fewer, neighbours share."""
    count = min(len(devices), num_devices)
    return [devices[i * count // num_devices] for i in range(num_devices)]


def share_batches(batches):
    """Divides each batch among replicas. By default hosts divide the files."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return batches.with_options(options).prefetch(tf.data.AUTOTUNE)


def _mirrored(num_devices, num_replicas):
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    if num_replicas is None:
        num_replicas = max(1, num_gpus // num_devices) if num_gpus else 2
    ensure(num_devices * num_replicas)
    rows = placement.assign(None, num_devices, num_replicas)
    strategy = tf.distribute.MirroredStrategy([row[0] for row in rows])
    return Hardware(strategy, rows, num_replicas)


def _multi_worker(num_devices):
    if not os.environ.get("TF_CONFIG"):
        raise UserError(
            "--strategy=multi_worker needs the addresses of all hosts in the "
            "environment variable TF_CONFIG, such as "
            '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, '
            '"task": {"type": "worker", "index": 0}}.'
        )
    ensure(num_devices)
    try:
        config = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        hosts = config.cluster_spec()
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            # With at most one GPU, so that a host is one replica: its other
            # GPUs are for stages.
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                hosts,
                task_type=config.task_type,
                task_id=config.task_id,
                rpc_layer="grpc",
                num_accelerators={
                    "GPU": min(1, len(tf.config.list_physical_devices("GPU")))
                },
            )
        )
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"Cannot use TF_CONFIG: {error}") from error
    return Hardware(
        strategy,
        num_replicas=strategy.num_replicas_in_sync,
        is_chief=config.task_type == "chief"
        or ("chief" not in hosts.jobs and config.task_id == 0),
    )


def _tpu(num_devices, num_replicas, tpu):
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu="local" if tpu is None else tpu
        )
        if tpu is not None:
            tf.config.experimental_connect_to_cluster(resolver)
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, tf.errors.OpError) as error:
        raise UserError(f"No TPU {tpu or 'in this host'}: {error}") from error
    mesh = [int(n) for n in topology.mesh_shape]
    num_cores = math.prod(mesh)
    # The shapes of blocks of `num_devices` cores that tile the TPU.
    shapes = [
        shape
        for shape in itertools.product(*(range(1, n + 1) for n in mesh))
        if math.prod(shape) == num_devices
        and not any(n % m for n, m in zip(mesh, shape, strict=True))
    ]
    if num_replicas is None:
        num_replicas = num_cores // num_devices
    if not shapes or num_replicas * num_devices > num_cores:
        raise UserError(
            f"{num_replicas} replicas of {num_devices} devices do not fit a "
            f"TPU of {num_cores} cores, in a mesh of shape {mesh}."
        )
    # The shape with the most neighbouring cores of one chip, which is the last
    # axis: consecutive stages are then close to each other.
    shape = max(shapes, key=lambda shape: (shape[-1], shape))
    strategy = tf.distribute.TPUStrategy(
        resolver,
        experimental_device_assignment=(
            tf.tpu.experimental.DeviceAssignment.build(
                topology,
                computation_shape=list(shape),
                num_replicas=num_replicas,
            )
        ),
    )
    return Hardware(strategy, num_replicas=num_replicas)
