"""Lingvo's gpipe: two servers of one core each, or one device.

Lingvo's pipeline always recomputes. Two devices of one process would share
their threads, so that a single stage could use both cores.
"""

import atexit
import os
import socket
import subprocess
import sys
import time
import types
from importlib import metadata

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # noqa: E402

from tools import child_process  # noqa: E402
from tools.peers import program  # noqa: E402


def _missing(*args, **kwargs):
    raise NotImplementedError("Lingvo's kernels are not loaded.")


# Lingvo's library of kernels needs a newer C library than many systems have.
# The only one of them that the pipeline uses is an assertion about shapes.
_kernels = types.ModuleType("lingvo.core.ops.gen_x_ops")
_kernels.__getattr__ = lambda name: _missing
_kernels.assert_same_dim0 = lambda *args, **kwargs: tf.no_op()
sys.modules[_kernels.__name__] = _kernels

from lingvo.core import base_layer  # noqa: E402
from lingvo.core import cluster_factory  # noqa: E402
from lingvo.core import gpipe  # noqa: E402
from lingvo.core import py_utils  # noqa: E402
from lingvo.core import sendrecv  # noqa: E402
from lingvo.core import tshape  # noqa: E402

_V1 = tf.compat.v1
_V1.disable_eager_execution()
_HOST = "127.0.0.1"
_PORTS = "LINGVO_GPIPE_PORTS"


class _Layer(base_layer.BaseLayer):
    """One layer of the benchmark."""

    @classmethod
    def Params(cls):
        params = super().Params()
        params.Define("kind", "", "As of `program.layers`.")
        params.Define("shapes", [], "Those of the weights.")
        return params

    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        for name, shape in zip(self._names(), self.params.shapes, strict=True):
            self.CreateVariable(
                name,
                py_utils.WeightParams(
                    list(shape), py_utils.WeightInit.Constant(0.0), tf.float32
                ),
            )

    def _names(self):
        return [f"w{i:02d}" for i in range(len(self.params.shapes))]

    def FProp(self, theta, x):
        weights = [theta[name] for name in self._names()]
        return _FUNCTIONS[self.params.kind](x, *weights)

    @classmethod
    def FPropMeta(cls, params, x):
        shape = list(x)
        if params.kind == "convolution":
            shape[-1] = params.shapes[0][-1]
        elif params.kind == "dense":
            shape[-1] = params.shapes[0][1]
        elif params.kind == "pooled_dense":
            shape = [shape[0], params.shapes[0][1]]
        return py_utils.NestedMap(flops=1, out_shapes=(tshape.Shape(shape),))


def _norm(x, scale, shift, axes, keepdims=True):
    mean, variance = tf.nn.moments(x, axes, keepdims=keepdims)
    return tf.nn.batch_normalization(
        x, mean, variance, shift, scale, program.EPSILON
    )


def _dense(x, kernel, bias):
    rows = tf.reshape(x, [-1, x.shape[-1]])
    rows = tf.nn.bias_add(tf.matmul(rows, kernel), bias)
    return tf.reshape(rows, [*x.shape[:-1], kernel.shape[-1]])


def _attention(x, scale, shift, *kernels):
    batch, length, width = x.shape
    heads = program.NUM_HEADS
    h = _norm(x, scale, shift, -1)
    query, key, value = (
        tf.transpose(
            tf.reshape(_dense(h, w, b), [batch, length, heads, width // heads]),
            [0, 2, 1, 3],
        )
        for w, b in zip(kernels[:6:2], kernels[1:6:2], strict=True)
    )
    query *= (width // heads) ** -0.5
    weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True))
    h = tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3])
    return x + _dense(tf.reshape(h, [batch, length, width]), *kernels[6:])


def _feed_forward(x, scale, shift, inner, inner_bias, outer, outer_bias):
    h = tf.nn.relu(_dense(_norm(x, scale, shift, -1), inner, inner_bias))
    return x + _dense(h, outer, outer_bias)


def _convolution(x, kernel, scale, shift):
    # Takes the statistics of the batch as Lingvo's own layer does: TensorFlow's
    # fused operation fails in Lingvo's recomputation.
    x = tf.nn.conv2d(x, kernel, 1, "SAME")
    return tf.nn.relu(_norm(x, scale, shift, [0, 1, 2], keepdims=False))


def _residual(x, *weights):
    return x + _convolution(_convolution(x, *weights[:3]), *weights[3:])


def _pooled_dense(x, kernel, bias):
    return _dense(tf.reduce_mean(x, [1, 2]), kernel, bias)


_FUNCTIONS = {
    "attention": _attention,
    "feed_forward": _feed_forward,
    "dense": _dense,
    "convolution": _convolution,
    "residual": _residual,
    "pooled_dense": _pooled_dense,
}


def main():
    args = program.parse_args(__doc__)
    if _PORTS in os.environ:
        _server(os.environ[_PORTS].split(","), 1).join()
    target = ""
    if args.num_stages > 1:
        if args.remat != "always":
            raise ValueError("Lingvo's pipeline always recomputes.")
        target = _servers()
    else:
        _use_core(0)
    started = time.perf_counter()
    train = _trained(args, target)
    versions = {
        "tensorflow": tf.__version__,
        "lingvo": metadata.version("lingvo"),
    }
    program.serve(train, started, versions)
    # TensorFlow's servers do not end on their own.
    sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(0)


def _use_core(index):
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})


def _server(ports, index):
    _use_core(index)
    return _V1.train.Server(
        {"localhost": [f"{_HOST}:{port}" for port in ports]},
        "localhost",
        index,
        config=_V1.ConfigProto(
            intra_op_parallelism_threads=1, inter_op_parallelism_threads=2
        ),
    )


def _servers():
    """Starts the second server, becomes the first, and returns its address."""
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind((_HOST, 0))
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    second = subprocess.Popen(
        [sys.executable, "-m", "tools.peers.lingvo_gpipe", *sys.argv[1:]],
        stdout=sys.stderr,
        env={**os.environ, _PORTS: ",".join(ports)},
        preexec_fn=child_process.end_with_parent,
    )
    atexit.register(second.kill)
    target = _server(ports, 0).target
    with _V1.Session(target) as session:
        incarnations = {
            device.name: (device.incarnation + 2**63) % 2**64 - 2**63
            for device in session.list_devices()
        }
    # Lingvo passes 0 as the incarnation, which is right in one process only.
    for name in ("Send", "Recv"):
        operation = getattr(sendrecv.tf.raw_ops, name)
        setattr(
            sendrecv.tf.raw_ops,
            name,
            lambda operation=operation, **kwargs: operation(
                **{
                    **kwargs,
                    "send_device_incarnation": incarnations[
                        kwargs["send_device"]
                    ],
                }
            ),
        )
    return target


def _trained(args, target):
    """Builds the graph, and returns `train` for `program.serve`."""
    layers = program.layers(args)
    cells = [
        _Layer.Params().Set(
            name=f"l{i:02d}", kind=kind, shapes=[w.shape for w in weights]
        )
        for i, (kind, weights) in enumerate(layers)
    ]
    stages = [cells]
    if args.num_stages > 1:
        cut = len(program.halves(args)[0])
        stages = [cells[:cut], cells[cut:]]
    templates = [
        gpipe.FeatureExtractionLayer.Params().Set(name=f"s{k}", sub=stage)
        for k, stage in enumerate(stages)
    ]
    if args.num_stages > 1:
        params = gpipe.PipeliningLayer.Params().Set(
            num_micro_batches=args.num_micro_batches
        )
    else:
        params = gpipe.SeqLayer.Params()
    params.Set(name="pipe", cell_tpl=templates)
    x, y = program.data(args)
    with cluster_factory.ForTestingWorker(
        mode="sync",
        job="trainer_client",
        cpus=args.num_stages,
        split_size=args.num_stages,
    ) as cluster:
        if target:
            cluster.WorkerDeviceInModelSplit = lambda k: (
                f"/job:localhost/replica:0/task:{k}/device:CPU:0"
            )
        py_utils.GetOrCreateGlobalStepVar()
        layer = params.Instantiate()
        with tf.device(cluster.WorkerDeviceInModelSplit(0)):
            inputs = tf.constant(x)
        logits = layer.FPropDefaultTheta(inputs)
        with tf.device(cluster.WorkerDeviceInModelSplit(args.num_stages - 1)):
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            )
        variables = [
            variable
            for template, stage in zip(templates, stages, strict=True)
            for cell in stage
            for _, variable in sorted(
                layer.vars[template.name][cell.name].FlattenItems()
            )
        ]
        gradients = _V1.gradients(
            loss, variables, colocate_gradients_with_ops=True
        )
        optimizer = _V1.train.GradientDescentOptimizer(program.LEARNING_RATE)
        with tf.control_dependencies([loss]):
            update = optimizer.apply_gradients(
                zip(gradients, variables, strict=True)
            )
    session = _V1.Session(
        target,
        config=_V1.ConfigProto(
            device_count={"CPU": args.num_stages},
            intra_op_parallelism_threads=1,
            inter_op_parallelism_threads=args.num_stages,
            allow_soft_placement=False,
        ),
    )
    session.run(_V1.global_variables_initializer())
    values = [w for _, weights in layers for w in weights]
    for variable, value in zip(variables, values, strict=True):
        variable.load(value, session)
    session.graph.finalize()

    return program.repeated(lambda: session.run([loss, update])[0])


if __name__ == "__main__":
    main()
