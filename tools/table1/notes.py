"""Notes on why plan, paper and measurement differ."""

from tools.table1.published import FAMILIES

MERGED = (
    "TensorFlow merges operations that are equal, such as the ReLU of a "
    "tensor that two cells take; the plan counts each."
)
SHAPES = (
    "Without rematerialisation a stage returns to its backward pass also "
    "tensors of which that takes but the shape, such as the scores of masked "
    "attention; the plan does not count these."
)


def of_plans(found):
    """Returns lines that say why plan and paper differ.

    Args:
        found: List of what `planned.plan_row` returned.
    """
    worst = max(
        abs(x["parameters"] / x["paper"]["parameters"] - 1) for x in found
    )
    notes = [
        f"Parameters are within {worst:.1%} of the paper's, which are rounded.",
        "12 bytes are a weight and two slots. tf_gpipe needs 16: the gradients "
        "of a parameter add up over the micro-batches.",
    ]
    for model, write in (
        ("amoebanet_d", _notes_on_amoebanet),
        ("transformer_lm", _notes_on_transformer),
    ):
        own = [x for x in found if x["model"] == model]
        naive = [x for x in own if x["name"] == "Naive-1"]
        piped = [x for x in own if x not in naive]
        title = FAMILIES[model].title
        if own:
            notes += [f"{title}: {note}" for note in write(naive, piped)]
    return notes


def _notes_on_amoebanet(naive, piped):
    per_parameter = [
        f"{x['paper']['parameter_gb'] * 1e9 / x['parameters']:.1f}"
        for x in naive + piped
    ]
    yield (
        f"the paper's parameter memory is {', '.join(per_parameter)} bytes for "
        "each of our parameters, its GB taken for 10^9. Why it is not 12 in "
        "all rows is not known."
    )
    for x in naive:
        yield _note_on_naive(x, x["paper"]["activation_gb"])
    if piped:
        note = (
            f"activations in the pipelines are {_activations(piped)} of the "
            f"paper's, with M={piped[0]['num_micro_batches']}. They grow with "
            "the rows of a micro-batch; the paper does not tell its M."
        )
        defaults = {"num_micro_batches": 128, "dtype_policy": "float32"}
        if defaults.items() <= piped[0].items():
            note += (
                " With --micro_batch_size=4 they are less than the paper's in "
                "all rows, with 16 more in all rows."
            )
        yield note
        last = piped[-1]["activation_bytes"]
        if len(last) > 1:
            yield (
                f"the first of {len(last)} stages has "
                f"{last[0] / sum(last):.0%} of the activations: images are "
                "largest there, and stages have nearly equal parameters."
            )
        yield (
            "measured on a CPU (--run), stages need less than planned. "
            + MERGED
        )


def _notes_on_transformer(naive, piped):
    for x in naive:
        paper = x["paper"]
        yield (
            f"the paper's {paper['parameter_gb']} GB of parameters in Naive-1 "
            f"would be {paper['parameter_gb'] * 2**30 / x['parameters']:.0f} "
            "bytes each. At 12 bytes they are "
            f"{12 * x['parameters'] / 2**30:.2f} GiB, what it gives for "
            "activations: the two seem to be swapped."
        )
        yield _note_on_naive(x, paper["parameter_gb"])
    if piped:
        per_parameter = [
            x["paper"]["parameter_gb"] * 2**30 / x["parameters"] for x in piped
        ]
        yield (
            "the paper's parameter memory in the pipelines is "
            f"{_range(per_parameter)} bytes a parameter, its GB taken for 2^30."
        )
        yield (
            f"activations in the pipelines are {_activations(piped)} of the "
            "paper's; with the sums of gradients, 4 bytes a parameter, "
            f"{_activations(piped, 4)}. That the paper counts those among them "
            "is supposed."
        )
    if (naive + piped)[0]["dtype_policy"] == "float32":
        yield (
            "--dtype_policy=mixed_bfloat16 brings more activations, not fewer: "
            "the softmax of attention is kept in float32 and in bfloat16, and "
            "weights as bfloat16 copies."
        )


def _note_on_naive(x, paper_gb):
    """Returns a note on Naive-1's activations against the paper's."""
    ratio = sum(x["activation_bytes"]) / 2**30 / paper_gb
    batch_size = FAMILIES[x["model"]].batch_size
    return (
        f"activations in Naive-1 are {ratio:.1f} times the paper's. They are "
        "proportional to the mini-batch, and would agree with one of "
        f"{batch_size / ratio:.0f} rows instead of {batch_size}. That the "
        "paper's was smaller, or that XLA keeps less, is supposed."
    )


def _activations(found, more=0):
    """Returns the ratios of activations to the paper's, as text.

    Args:
        found: List of what `planned.plan_row` returned.
        more: Integer, bytes a parameter to add to the activations.
    """
    return _range(
        (sum(x["activation_bytes"]) + more * x["parameters"])
        / 2**30
        / x["paper"]["activation_gb"]
        for x in found
    )


def _range(values):
    values = sorted(values)
    low, high = f"{values[0]:.2f}", f"{values[-1]:.2f}"
    return low if low == high else f"{low} to {high}"
