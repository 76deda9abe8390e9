"""Public names are documented: arguments, results, an example."""

import doctest
import inspect
import pathlib
import re

import keras
import tensorflow as tf
from absl.testing import parameterized

import model_zoo
import tf_gpipe
from tf_gpipe.planning.plans import Rival
from tf_gpipe.planning.plans import StagePlan
from tf_gpipe.schedule import memory
from tf_gpipe.schedule import schedules
from tf_gpipe.schedule import search
from tf_gpipe.schedule import simulate
from tf_gpipe.schedule import tasks
from tf_gpipe.schedule import timeline
from tf_gpipe.stage.stage import Stage
from tf_gpipe.verification import report

ROOT = pathlib.Path(__file__).parents[1]
PIPELINES = (tf_gpipe.PipelinedSequential, tf_gpipe.PipelinedModel)
CALLBACKS = (
    tf_gpipe.callbacks.Timeline,
    tf_gpipe.callbacks.Rebalance,
    tf_gpipe.callbacks.Checkpoint,
)
# Classes of which results consist, and functions that take or make them.
PARTS = (
    Rival,
    Stage,
    StagePlan,
    report.Difference,
    report.Report,
    schedules.get,
    search.search,
    simulate.Execution,
    simulate.Span,
    simulate.Times,
    simulate.simulate,
    memory.Sizes,
    tasks.Task,
    timeline.chrome_trace,
    timeline.picture,
    timeline.text_chart,
)
# The examples of the results that contain them show them.
WITHOUT_EXAMPLE = (Rival, report.Difference, simulate.Span)
# Methods that differ from the plain model's, with docstrings of their own.
OWN_WORDS = (
    "call",
    "compute_output_spec",
    "build",
    "stateless_call",
    "summary",
)
NAMES = [
    getattr(tf_gpipe, x)
    for x in tf_gpipe.__all__
    if x not in ("__version__", "callbacks")
]
NAMES += [*CALLBACKS, *PARTS, model_zoo.get, model_zoo.names]


def own_members(cls):
    """Returns a class's public members that no class of Keras defines."""
    found = {}
    for name in dir(cls):
        owners = [c for c in cls.__mro__ if name in vars(c)]
        if name.startswith("_") or not all(
            x.__module__.startswith("tf_gpipe") for x in owners
        ):
            continue
        member = vars(owners[0])[name]
        if callable(getattr(member, "__func__", member)) or isinstance(
            member, property
        ):
            found[f"{cls.__name__}.{name}"] = member
    return found


MEMBERS = {
    key: member
    for cls in NAMES
    if inspect.isclass(cls)
    for key, member in own_members(cls).items()
    # A named tuple's fields are the attributes of its class.
    if isinstance(member, (property, classmethod)) or inspect.isfunction(member)
}


def arguments(thing):
    """Returns the names of the arguments that users give."""
    thing = getattr(thing, "__func__", thing)
    # Only the library makes a `Stage`.
    if isinstance(thing, property) or thing is Stage:
        return []
    if inspect.isclass(thing) and "__init__" in vars(thing):
        thing = thing.__init__
    found = inspect.signature(thing).parameters
    return [x for x in found if x not in ("self", "cls")]


def keras_docstrings(cls, name):
    """Returns Keras's docstring of a method, or `None`."""
    for base in cls.__mro__:
        words = getattr(vars(base).get(name), "__doc__", None)
        if not base.__module__.startswith("tf_gpipe") and words:
            return inspect.cleandoc(words)
    return None


class PublicNamesTest(parameterized.TestCase, tf.test.TestCase):
    @parameterized.parameters(*NAMES)
    def test_name(self, thing):
        words = inspect.getdoc(thing)
        self.check_arguments(thing, words)
        if inspect.isclass(thing) and arguments(thing):
            self.assertRegex(words, "(?m)^(Attributes|Args):$")
        returns = inspect.signature(thing).return_annotation
        if inspect.isfunction(thing) and returns is not None:
            self.assertRegex(words, "Returns:|Returns ")
        if thing not in WITHOUT_EXAMPLE:
            self.assertRegex(words, r"(?m)^Example:\n\n(>>> |```python)")

    @parameterized.parameters(*MEMBERS)
    def test_member(self, key):
        member = MEMBERS[key]
        words = inspect.getdoc(getattr(member, "__func__", member))
        self.assertTrue(words, key)
        self.check_arguments(member, words)
        if not isinstance(member, property):
            function = getattr(member, "__func__", member)
            returns = inspect.signature(function).return_annotation
            if returns not in (None, inspect.Signature.empty):
                self.assertRegex(words, "Returns:|Returns ", key)

    def check_arguments(self, thing, words):
        """Checks that each argument is listed after `Args:`."""
        self.assertTrue(words)
        self.assertNotRegex(words, r"As of `|As for `PipelinedS")
        _, *documented = re.split(r"(?m)^(?:Args|Attributes):$", words)
        for name in arguments(thing):
            self.assertRegex(
                "".join(documented),
                rf"(?m)^    \*{{0,2}}{name}: ",
                f"{thing} takes {name}.",
            )

    @parameterized.product(
        cls=PIPELINES,
        name=sorted(
            {
                name
                for cls in PIPELINES
                for name in dir(cls)
                if not name.startswith("_")
            }
        ),
    )
    def test_overrides_have_keras_words(self, cls, name):
        """`help(model.fit)` shows Keras's docstring."""
        if not hasattr(cls, name):
            return
        owner = next(c for c in cls.__mro__ if name in vars(c))
        if not owner.__module__.startswith("tf_gpipe"):
            return
        mine = vars(owner)[name]
        words = inspect.getdoc(getattr(mine, "__func__", mine))
        self.assertTrue(words, name)
        theirs = keras_docstrings(cls, name)
        if name in OWN_WORDS:
            return
        if theirs is not None:
            self.assertEqual(words, theirs)

    @parameterized.parameters(
        "fit",
        "evaluate",
        "predict",
        "compile",
        "train_on_batch",
        "save",
        "save_weights",
        "load_weights",
        "get_weights",
        "export",
    )
    def test_help_of_a_model(self, name):
        model = tf_gpipe.PipelinedSequential(
            [keras.Input((2,)), keras.layers.Dense(2)], num_stages=1
        )
        method = getattr(model, name)
        self.assertGreater(len(inspect.getdoc(method)), 40)
        self.assertEqual(
            inspect.signature(method).parameters.keys(),
            inspect.signature(getattr(keras.Model(), name)).parameters.keys(),
        )

    @parameterized.parameters(*PIPELINES)
    def test_help_of_a_class(self, cls):
        self.assertEqual(
            [*inspect.signature(cls).parameters],
            arguments(cls),
        )

    def test_reference(self):
        """docs/api.md lists all public names."""
        page = (ROOT / "docs" / "api.md").read_text()
        listed = re.findall(r"(?m)^::: (\S+)$", page)
        for thing in NAMES:
            self.assertTrue(
                [x for x in listed if x.split(".")[-1] == thing.__name__]
                or thing.__module__ == "model_zoo",
                f"{thing} is not in docs/api.md",
            )

    def test_examples_are_run(self):
        """documentation_test runs all examples but sketches."""
        finder = doctest.DocTestFinder(exclude_empty=True)
        sketches = [
            thing.__name__
            for thing in NAMES
            if ">>> " not in inspect.getdoc(thing)
            and "Example:" in inspect.getdoc(thing)
        ]
        self.assertTrue(finder.find(tf_gpipe.split_cpu))
        # It needs workers on other hosts.
        self.assertEqual(sketches, ["connect"])


if __name__ == "__main__":
    tf.test.main()
