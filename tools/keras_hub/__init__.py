"""A table of KerasHub's models as pipelines: `python -m tools.keras_hub`.

Every backbone, and every task of it, at a size that needs no download: is it
cut, does it train as in plain Keras, and does all that people do with it work?

backbones  the backbones and their tasks, at tiny size (images, tiny)
data       inputs and targets for a model, made up
trial      one model, compared with itself as plain Keras
table      what was found, as rows
"""
