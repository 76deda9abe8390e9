"""The public names of `tf_gpipe`, which its `__init__` imports."""

from tf_gpipe import callbacks as callbacks
from tf_gpipe.devices.cluster import connect as connect
from tf_gpipe.devices.local import split_cpu as split_cpu
from tf_gpipe.models.functional import PipelinedModel as PipelinedModel
from tf_gpipe.models.sequential import (
    PipelinedSequential as PipelinedSequential,
)
from tf_gpipe.planning.planner import plan as plan
from tf_gpipe.planning.plans import Plan as Plan
from tf_gpipe.schedule.tasks import Schedule as Schedule
from tf_gpipe.tuning.tune import tune as tune
from tf_gpipe.verification.verify import verify as verify
