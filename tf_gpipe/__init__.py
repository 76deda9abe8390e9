"""Pipeline parallelism with rematerialisation (GPipe) for Keras."""

from tf_gpipe._version import __version__
from tf_gpipe.schedule import Schedule
from tf_gpipe.sequential import PipelinedSequential

__all__ = ["PipelinedSequential", "Schedule", "__version__"]
