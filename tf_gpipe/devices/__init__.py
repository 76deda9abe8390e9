"""Where things are: devices, replicas, worker processes.

placement   which device each stage is on, its variables too
sharing     the same for a saved model, where its devices are not
replicas    several pipelines under a `tf.distribute` strategy
slots       what an optimizer keeps of a weight, beside the weight
colocation  what runs outside of the pipeline, where its operands are
cluster     worker processes: connecting, and telling which one is gone
listening   the one address that a TensorFlow server answers on
errors      which stage and layer an error on a device was raised by
"""
