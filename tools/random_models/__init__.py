"""Randomly drawn models, losses, optimizers and pipelines.

Each is run in plain Keras and as a pipeline, and the numbers are compared.

layers      kinds of layers that Keras lacks, and a loss
drawing     draws a model, its training and a pipeline from a seed
comparing   compares plain Keras with the pipeline
"""
