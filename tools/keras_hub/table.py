"""Turns the results of KerasHub's models into a Markdown table."""

import math
import re

USES = ("predict", "save_to_preset", "export", "enable_lora", "generate")
_HEADER = (
    "backbone",
    "task",
    "M",
    "K=2",
    "K=4",
    "float32",
    "float64",
    "as written",
    *USES,
)
# Largest difference of gradients allowed, relative to a variable's largest.
LIMITS = {"float32": 1e-5, "float64": 1e-10}
# Larger differences are allowed up to this multiple of the difference that
# rounding makes in plain Keras.
_ROUNDING = 10


def markdown(rows):
    """Returns a table, how many backbones have no problem, and the problems."""
    lines = [
        " | ".join(["", *_HEADER, ""]).strip(),
        "|" + "---|" * len(_HEADER),
        *(" | ".join(["", *_cells(x), ""]).strip() for x in rows),
    ]
    reasons = [
        f"- {_name(row)}: {reason}" for row in rows for reason in problems(row)
    ]
    every = {x["names"][0] for x in rows}
    good = every - {x["names"][0] for x in rows if problems(x)}
    told = f"{len(good)} of {len(every)} backbones"
    return "\n".join(
        [*lines, "", f"{told} without a reason below.", "", *reasons]
    )


def fullest(row, num_stages):
    """Returns the largest stage's parameters, relative to an equal share.

    Returns `None` if the model was not cut into `num_stages` stages.
    """
    sizes = row.get(f"K={num_stages}", {}).get("parameters")
    if not sizes or not sum(sizes):
        return None
    return max(sizes) * len(sizes) / sum(sizes)


def difference(row, dtype):
    """Returns the largest difference found in a dtype, or `None`."""
    found = [row[k][dtype] for k in ("K=2", "K=4") if dtype in row.get(k, {})]
    return max(found, default=None)


def problems(row):
    """Returns the problems of a model, as sentences."""
    errors = row.get("errors", {})
    found = []
    for step in ("process", "numbers", "uses"):
        if step in errors:
            found.append(f"{_plain(errors[step])}")
    for place in (row.get("K=2", {}), row.get("K=4", {})):
        for dtype, limit in LIMITS.items():
            differ, least = place.get(dtype, 0.0), place.get("rounding", 0.0)
            # The difference if TensorFlow does not rewrite graphs.
            written = place.get("as written", math.inf)
            if differ > max(limit, _ROUNDING * least) and written > limit:
                found.append(
                    f"gradients differ by {differ:.1e} of a variable's largest "
                    f"in {dtype}; {least:.1e} is rounding"
                )
    for use in USES:
        if row.get(use) in ("differs", "plain Keras fails"):
            ways = ("plain Keras", "float64 pipeline", "pipeline")
            tried = [errors.get(f"{use}, {way}") for way in ways]
            why = next(filter(None, tried), "")
            found.append(f"`{use}`: {row[use]}: {_plain(why)}")
    return found


def _cells(row):
    shares = [fullest(row, k) for k in (2, 4)]
    numbers = [difference(row, x) for x in LIMITS]
    if "float64" in row.get("K=4", {}):
        numbers.append(row["K=4"].get("as written"))
    else:
        numbers.append(None)
    return [
        *(x or "-" for x in row["names"]),
        str(row.get("micro_batches", "-")),
        *("-" if x is None else f"{x:.2f}" for x in shares),
        *("-" if x is None else f"{x:.0e}" for x in numbers),
        *(_use(row.get(x)) for x in USES),
    ]


def _use(found):
    return {
        None: "-",
        "pipeline": "yes",
        "float64 pipeline": "yes",
        "to_keras()": "`to_keras()`",
    }.get(found, "no")


def _name(row):
    return " ".join(filter(None, row["names"]))


def _plain(text):
    """Returns the end of an error, without colours and local directories.

    Bars are escaped for Markdown.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"\S*/\S*(site-packages|tools|tf_gpipe)/", "", text)
    return text.replace("|", "\\|").strip()[-240:]
