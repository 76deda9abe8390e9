"""The scope that records assignments of a stage's layers to variables."""

import keras
import tensorflow as tf

from tf_gpipe import upstream
from tf_gpipe.stage import loops
from tf_gpipe.stage.straight_through import straight_through


class AssignmentScope(keras.StatelessScope):
    """The stateless scope in which the layers of a stage run.

    A layer's assignment leaves the variable unchanged: the scope holds the new
    value.

    Args:
        state_mapping: List of pairs of a variable and its value in the scope,
            as `keras.StatelessScope` takes it.
        foreign: Ids of the trainable variables of other stages, which layers
            must not read.
        within: Ids of the variables that layers assign within loops and
            branches.

    Attributes:
        held: Dict from ids in `within` to `loops.Held`.
        found: List of variables that ought to be in `within`.
        updated: Dict from ids to the variables that layers have assigned to.
        unmapped: Dict from ids to the variables that layers have used and that
            had no value in the scope.
    """

    def __init__(self, state_mapping, foreign, within):
        super().__init__(state_mapping, collect_losses=True)
        self.held: dict[int, loops.Held] = {}
        self.found: list[keras.Variable] = []
        self._within = within
        self._graph = tf.compat.v1.get_default_graph()
        self.updated: dict[int, keras.Variable] = {}
        self.unmapped: dict[int, keras.Variable] = {}
        self._foreign = foreign
        self._stopped = upstream.tapes_are_stopped()

    def add_update(self, update):
        variable, value = update
        if self._is_held(variable):
            self.updated[id(variable)] = variable
            self.held[id(variable)].assign(value)
            return
        if loops.is_within(self._graph):
            # The value exists in the body alone; this trace is dropped.
            self.found.append(variable)
            return
        self.updated[id(variable)] = variable
        self._note(variable, super().get_current_value(variable))
        differentiable = value.dtype.is_floating or value.dtype.is_complex
        if differentiable and not variable.trainable:
            value = tf.stop_gradient(value)
        elif differentiable:
            before = self.get_current_value(variable)
            if before is None:
                # Not `variable.value`, which is cast under mixed precision.
                before = upstream.tensorflow_variable(variable)
            # As of a variable: the gradient by it is that by its last value.
            value = straight_through(value, tf.convert_to_tensor(before))
        super().add_update((variable, value))

    def get_current_value(self, variable):
        if variable.trainable and id(variable) in self._foreign:
            raise ValueError(
                f"Variable '{variable.path}' is no weight of the layers of "
                "this stage, so that its gradient would be lost. Make it a "
                "weight of the layer that uses it too. If layers have got "
                "weights since the model was built, call `model.rebalance`."
            )
        stopped = upstream.tapes_are_stopped() and not self._stopped
        if variable.trainable and stopped and id(variable) not in self.updated:
            # The layer is in a `keras.remat` of its own, which finds the
            # weights of the function that it will rerun by watching which
            # variables are read: so these must be read, not a tensor.
            return None
        if self._is_held(variable):
            return self.held[id(variable)].read()
        value = super().get_current_value(variable)
        self._note(variable, value)
        return value

    def _is_held(self, variable):
        """Returns whether a variable is held; it is from its first loop on."""
        key = id(variable)
        if key in self.held:
            return True
        if key not in self._within or not loops.is_within(self._graph):
            return False
        value = super().get_current_value(variable)
        self._note(variable, value)
        if value is None:
            value = upstream.tensorflow_variable(variable)
        with self._graph.as_default():
            value = tf.convert_to_tensor(value)
        self.held[key] = loops.Held(self._graph, value)
        return True

    def _note(self, variable, value):
        if value is None:
            self.unmapped[id(variable)] = variable
