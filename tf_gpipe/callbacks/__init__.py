"""Keras callbacks of pipelines.

step_times    when the tasks of a step ran, read from its graph
timeline      when each task of a step ran, on each device
images        pictures of steps for TensorBoard
profile       tasks within a profile of TensorFlow
rebalance     a new cut in training, from the times of tasks
checkpoint    a run that goes on where it was, to the same bits
monitors      what Keras's callbacks that watch a metric remember
"""

from tf_gpipe.callbacks.checkpoint import Checkpoint
from tf_gpipe.callbacks.rebalance import Rebalance
from tf_gpipe.callbacks.timeline import Timeline

__all__ = ["Checkpoint", "Rebalance", "Timeline"]
