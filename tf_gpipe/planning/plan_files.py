"""Plans in files, as JSON.

This module imports no TensorFlow.
"""

import dataclasses
import json
from typing import Any

from tf_gpipe import checks
from tf_gpipe.schedule.tasks import AUTO_REMAT
from tf_gpipe.schedule.tasks import Schedule
from tf_gpipe.schedule.tasks import check_remat
from tf_gpipe.whole_files import replacing

_FORMAT = "tf_gpipe.Plan"
_VERSION = 1


def plain(plan: Any) -> dict[str, Any]:
    """Returns the fields of a plan for JSON, without its tasks."""
    found = dataclasses.asdict(dataclasses.replace(plan, tasks=None))
    del found["tasks"]
    for stage in found["stages"]:
        # The keys of JSON's objects are strings.
        stage["sends"] = {str(k): v for k, v in stage["sends"].items()}
    return found


def save(plan: Any, path: Any) -> None:
    """Writes a plan into a file; see `Plan.save`."""
    checks.writable("path", path)
    place = checks.path("path", path)
    config = {
        "format": _FORMAT,
        "version": _VERSION,
        **plain(plan),
        "tasks": plan.tasks and plan.tasks.get_config(),
    }
    text = json.dumps(config, indent=1)
    try:
        with replacing(place) as new:
            new.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            "`path` must be the path of a file that can be written. Received: "
            f"path={path!r} ({error})"
        ) from error


def load(path: Any, plan_of: Any, stage_of: Any, rival_of: Any) -> Any:
    """Returns the plan in a file; see `Plan.load`."""
    place = checks.path("path", path)

    def refused(what: str) -> ValueError:
        return ValueError(
            "`path` must be the path of a file that `Plan.save` has written. "
            f"Received: path={place!r}, {what}. Plan anew, with "
            "`tf_gpipe.tune` or `tf_gpipe.plan`."
        )

    try:
        with open(place, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        raise refused(f"which cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise refused("which is damaged, or no JSON") from error
    if not isinstance(config, dict) or config.pop("format", None) != _FORMAT:
        raise refused("which is no plan")
    version = config.pop("version", None)
    if version != _VERSION:
        raise refused(
            f"which is of version {version!r}; this tf_gpipe reads {_VERSION}"
        )
    try:
        config["stages"] = [
            stage_of(**{**x, "sends": _numbered(x["sends"])})
            for x in config["stages"]
        ]
        config["rivals"] = [rival_of(**x) for x in config["rivals"]]
        if config["tasks"] is not None:
            config["tasks"] = Schedule(**config["tasks"])
        plan = plan_of(**config)
        _check(plan)
    except (
        ArithmeticError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise refused(f"which is damaged ({error})") from error
    return plan


def _numbered(sends: dict[str, int]) -> dict[int, int]:
    return {int(k): int(v) for k, v in sends.items()}


def _check(plan: Any) -> None:
    """Refuses a plan that contradicts itself."""
    tasks, stages = plan.tasks, plan.stages
    if tasks is None or (
        tasks.num_stages != len(stages)
        or tasks.num_micro_batches != plan.num_micro_batches
        or tasks.devices != plan.devices
        or tasks.name != plan.schedule
        or len(tasks.tasks) != plan.num_devices
    ):
        raise ValueError("its tasks are not those of its stages")
    for stage in stages:
        checks.positive_integer("layers", len(stage.layers))
    checks.positive_integer("num_replicas", plan.num_replicas)
    if plan.nominal_length is not None:
        length = plan.nominal_length
        for x in length if isinstance(length, list) else [length]:
            checks.positive_integer("nominal_length", x)
    for memory in plan.memories:
        if memory is not None:
            checks.positive_integer("device_memory", memory)
    check_remat(plan.remat)
    if (plan.remat == AUTO_REMAT) != (plan.memory_limit is not None):
        raise ValueError("its memory limit is not that of its remat mode")
    # The table fails unless all other fields have the right types and lengths.
    str(plan)
