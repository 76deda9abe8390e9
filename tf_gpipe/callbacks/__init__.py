"""Keras callbacks of pipelines.

timeline      when each task of a step ran, on each device
images        pictures of steps for TensorBoard
profile       tasks within a profile of TensorFlow
checkpoint    a run that goes on where it was, to the same bits
monitors      what Keras's callbacks that watch a metric remember
"""

from tf_gpipe.callbacks.checkpoint import Checkpoint
from tf_gpipe.callbacks.timeline import Timeline

__all__ = ["Checkpoint", "Timeline"]
