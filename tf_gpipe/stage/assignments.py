"""The scope that records assignments of a stage's layers to variables."""

import keras
import tensorflow as tf

from tf_gpipe import upstream
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

    Attributes:
        updated: Dict from ids to the variables that layers have assigned to.
        unmapped: Dict from ids to the variables that layers have used and that
            had no value in the scope.
    """

    def __init__(self, state_mapping, foreign):
        super().__init__(state_mapping, collect_losses=True)
        self.updated: dict[int, keras.Variable] = {}
        self.unmapped: dict[int, keras.Variable] = {}
        self._foreign = foreign
        self._stopped = upstream.tapes_are_stopped()

    def add_update(self, update):
        variable, value = update
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
        value = super().get_current_value(variable)
        self._note(variable, value)
        return value

    def _note(self, variable, value):
        if value is None:
            self.unmapped[id(variable)] = variable
