"""Keras callbacks of pipelines.

step_times    start and end of each task of a step, measured in its graph
timeline      charts of these times, and how long each device was idle
images        pictures of steps for TensorBoard
profile       tasks added to a profile of TensorFlow's profiler
rebalance     a new cut during training, from measured task times
checkpoint    checkpoints, and exact resumption from the newest one
resumable     whether training can go on from a checkpoint
snapshots     what a checkpoint is to hold, as it is between two steps
monitors      the state of `EarlyStopping` and its like, in checkpoints
"""

from tf_gpipe.callbacks.checkpoint import Checkpoint
from tf_gpipe.callbacks.rebalance import Rebalance
from tf_gpipe.callbacks.timeline import Timeline

__all__ = ["Checkpoint", "Rebalance", "Timeline"]
