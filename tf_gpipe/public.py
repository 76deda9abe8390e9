"""The public names of `tf_gpipe`, which its `__init__` imports."""

from tf_gpipe import callbacks
from tf_gpipe.devices.cluster import connect
from tf_gpipe.devices.local import split_cpu
from tf_gpipe.models.functional import PipelinedModel
from tf_gpipe.models.sequential import PipelinedSequential
from tf_gpipe.planning.planner import plan
from tf_gpipe.planning.plans import Plan
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.tuning.tune import tune
from tf_gpipe.verification.verify import verify

__all__ = [
    "Plan",
    "PipelinedModel",
    "PipelinedSequential",
    "Schedule",
    "callbacks",
    "connect",
    "plan",
    "split_cpu",
    "tune",
    "verify",
]
