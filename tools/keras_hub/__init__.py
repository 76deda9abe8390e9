"""A table of KerasHub's models as pipelines: `python -m tools.keras_hub`.

Tries every backbone with each of its tasks, at a size that needs no download:
can it be cut into stages, does it train as in plain Keras, and do prediction,
saving, export, LoRA and generation work?

backbones  makes the backbones, at tiny size (images, tiny), and finds tasks
data       makes up inputs and targets for a model
trial      compares one model as a pipeline with the same model in plain Keras
table      turns the results into a Markdown table
"""
