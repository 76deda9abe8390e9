"""Turns the results of `keras.applications` into a Markdown table."""

_HEADER = ("model", "recipe", "layers", "K", "M", "fullest", "differs")
# Largest difference allowed in float64, relative to a variable's largest entry.
LIMIT = 1e-8


def markdown(rows):
    """Returns a table, and a list of problems."""
    lines = [
        " | ".join(["", *_HEADER, ""]).strip(),
        "|" + "---|" * len(_HEADER),
    ]
    for row in rows:
        lines += [
            " | ".join(["", *_cells(row["names"][0], x), ""]).strip()
            for x in row.get("trials", ())
        ]
    reasons = [
        f"- {row['names'][0]}: {reason}"
        for row in rows
        for reason in problems(row)
    ]
    return "\n".join([*lines, "", *reasons])


def problems(row):
    """Returns the problems of a model, as sentences."""
    found = [str(x) for x in row.get("errors", {}).values()]
    for trial in row.get("trials", ()):
        differs = max(trial["differs"].values())
        if not differs <= LIMIT:
            found.append(
                f"{trial['recipe']} in {trial['K']} stages, M={trial['M']}: "
                f"{trial['differs']}"
            )
    return found


def _cells(name, trial):
    return [
        name,
        trial["recipe"],
        str(trial["calls"]),
        str(trial["K"]),
        str(trial["M"]),
        f"{trial['fullest']:.2f}",
        f"{max(trial['differs'].values()):.0e}",
    ]
