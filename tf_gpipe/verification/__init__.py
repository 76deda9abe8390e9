"""Whether a pipeline has the plain Keras model's numbers, all of them.

verify  one mini-batch through both, compared
steps   steps of one model, as a pipeline and as the plain model
layers  which layers differ
report  differences, measured against rounding
memory  whether one device has room for the plain model
"""
