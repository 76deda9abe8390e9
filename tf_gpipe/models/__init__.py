"""The Keras models that users hold (section 2.1 of the paper, the interface).

sequential  functional   PipelinedSequential, PipelinedModel
     '----------'
      pipelined          the model is cut, moved to its devices
          |
      training           `fit`, `train_step`, the optimizer
          |
        calls            the model as a layer, within gradient tapes

mini_batch_loss the loss of a mini-batch and its gradients, in two orders
traced_once     training and test steps that TensorFlow traces only once
several_steps   several steps of `steps_per_execution` in one graph
step_functions  step functions, traced again when a callback changes the model
callback_order  callbacks that add to the logs first, checkpoints last
user_class      pipelines that keep the class of the user's own model
arguments       the constructor arguments of a pipeline, as attributes
saving          `get_config`, `export`, and conversion back to plain Keras
docstrings      Keras's docstrings of methods, and arguments of another class
deciding        the cut into stages, the schedule and the recomputed layers
placing         forms the stages and moves their variables to their devices
refused         checks that refuse layers and stages no pipeline can run
planned         constructor arguments taken from a plan
depth           the repair added to errors of Python's recursion limit
summary         the table of stages that `summary()` prints
"""
