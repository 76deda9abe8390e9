"""Pipeline parallelism with rematerialisation (GPipe) for Keras."""

from tf_gpipe import callbacks
from tf_gpipe._version import __version__
from tf_gpipe.cluster import connect
from tf_gpipe.functional import PipelinedModel
from tf_gpipe.planner import Plan
from tf_gpipe.planner import plan
from tf_gpipe.schedule import Schedule
from tf_gpipe.sequential import PipelinedSequential
from tf_gpipe.verify import verify

__all__ = [
    "Plan",
    "PipelinedModel",
    "PipelinedSequential",
    "Schedule",
    "__version__",
    "callbacks",
    "connect",
    "plan",
    "verify",
]
