"""What `keras.Model.fit` lacks where replicas are on several hosts."""

from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import replicas

# A `keras.Model` supplies the rest, of which no types are known.
_Mixin: Any = object


class SeveralHosts(_Mixin):
    """Mends `keras.Model.fit` for replicas on several hosts."""

    def _make_function(self, step_function):
        if not replicas.on_several_hosts(self._distribute_strategy):
            return super()._make_function(step_function)

        def with_axis(data):
            # Along which Keras takes means over replicas on several hosts.
            return keras.tree.map_structure(
                lambda x: tf.reshape(x, (1,)) if x.shape.rank == 0 else x,
                step_function(data),
            )

        return super()._make_function(with_axis)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        strategy = self._distribute_strategy
        if strategy is not None and iterator is not None:
            # Keras takes the mean of a batch over replicas, only to know its
            # shape, and fails where replicas are on several hosts.
            for _, _, steps in iterator:
                data_batch = keras.tree.map_structure(
                    lambda x: strategy.experimental_local_results(x)[0],
                    next(steps),
                )
                break
            iterator = None
        if strategy is not None and not self.built:
            # Keras goes on to build in a scope where no weight gets a value.
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data_batch)
            with strategy.scope():
                self._pipeline_for(x)
        super()._maybe_symbolic_build(iterator, data_batch)
