"""`tf_gpipe.verify`: whether a pipeline has the plain Keras model's numbers.

verify  compares a step of the pipeline with one of the plain model
step_comparison compares two steps, value by value
steps   runs steps of one model, as a pipeline and as the plain model
layers  finds the layers that cause a difference
report  the `Report`: differences relative to rounding
comparable whether a model can be compared, and has room on one device
"""
