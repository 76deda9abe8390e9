"""The Keras models that users hold (section 2.1 of the paper, the interface).

sequential  functional   PipelinedSequential, PipelinedModel
     '----------'
      pipelined          the model is cut, moved to its devices
          |
      training           `fit`, `train_step`, the optimizer
          |
        calls            the model as a layer, within gradient tapes

mini_batch_loss the loss of a mini-batch and its gradients, in two orders
traced_once     steps that TensorFlow traces once, and quickly
several_steps   steps of `steps_per_execution` that follow one another
step_functions  what callbacks change while a model runs
callback_order  callbacks that measure come before those that show it
user_class      a user's own class, kept when a pipeline is made of it
arguments       the arguments of a pipeline, as attributes
saving          what is written into files; the way back to plain Keras
keras_words     Keras's docstrings, where a pipeline has its own methods
deciding        how many calls each stage has, and which it recomputes
placing         the stages of a graph, and their variables on devices
refused         layers and stages that a pipeline refuses
planned         the arguments of a pipeline that follow from a plan
depth           what is said of models deeper than Python's recursion limit
summary         the table of stages of `summary()`
"""
