"""The benchmark's layers in PyTorch, which computes in one thread a stage."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tools.peers import program

torch.set_num_threads(1)
torch.set_num_interop_threads(1)


class _Layer(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = nn.ParameterList(
            # PyTorch's linear layers have kernels of (outputs, inputs).
            nn.Parameter(torch.from_numpy((w.T if w.ndim == 2 else w).copy()))
            for w in weights
        )


class _Attention(_Layer):
    def forward(self, x):
        scale, shift, *kernels, out, out_bias = self.weights
        batch, length, width = x.shape
        h = F.layer_norm(x, (width,), scale, shift, program.EPSILON)
        query, key, value = (
            F.linear(h, w, b)
            .view(batch, length, program.NUM_HEADS, -1)
            .transpose(1, 2)
            for w, b in zip(kernels[::2], kernels[1::2], strict=True)
        )
        h = F.scaled_dot_product_attention(query, key, value)
        h = h.transpose(1, 2).reshape(batch, length, width)
        return x + F.linear(h, out, out_bias)


class _FeedForward(_Layer):
    def forward(self, x):
        scale, shift, inner, inner_bias, outer, outer_bias = self.weights
        h = F.layer_norm(x, x.shape[-1:], scale, shift, program.EPSILON)
        h = F.relu(F.linear(h, inner, inner_bias))
        return x + F.linear(h, outer, outer_bias)


class _Dense(_Layer):
    def forward(self, x):
        return F.linear(x, *self.weights)


class _PooledDense(_Dense):
    def forward(self, x):
        return super().forward(x.mean((2, 3)))


class _Convolution(nn.Module):
    def __init__(self, weights):
        super().__init__()
        kernel, scale, _ = weights
        kernel = torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy())
        self.kernel = nn.Parameter(kernel)
        self.norm = nn.BatchNorm2d(len(scale), program.EPSILON, momentum=0.1)

    def forward(self, x):
        return F.relu(self.norm(F.conv2d(x, self.kernel, padding=1)))


class _Residual(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.body = nn.Sequential(
            _Convolution(weights[:3]), _Convolution(weights[3:])
        )

    def forward(self, x):
        return x + self.body(x)


_KINDS = {
    "attention": _Attention,
    "feed_forward": _FeedForward,
    "dense": _Dense,
    "convolution": _Convolution,
    "residual": _Residual,
    "pooled_dense": _PooledDense,
}


def make(layers):
    """Returns a list of modules for what `program.layers` returned."""
    return [_KINDS[kind](weights) for kind, weights in layers]


class Rematerialized(nn.Sequential):
    """A chain of modules that the backward pass recomputes."""

    def forward(self, x):
        return checkpoint(
            super().forward, x, use_reentrant=False, preserve_rng_state=False
        )


def data(args):
    """Returns inputs and labels as tensors, images with channels first."""
    x, y = map(torch.from_numpy, program.data(args))
    return (x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x), y


def loss(logits, labels):
    """Returns the mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def train_on_one_device(args, model):
    """Returns `train` for `program.serve`, for a model on one device.

    Args:
        args: What `program.parse_args` returned.
        model: A module, or a `torchgpipe.GPipe`.
    """
    x, y = data(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=program.LEARNING_RATE)

    def step():
        optimizer.zero_grad()
        found = loss(model(x), y)
        found.backward()
        optimizer.step()
        return found.item()

    return program.repeated(step)
