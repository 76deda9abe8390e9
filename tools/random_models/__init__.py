"""Models, losses, optimizers and pipelines that are drawn by chance.

All that is drawn is trained as plain Keras and as a pipeline, and compared.

layers      layers of kinds that Keras has none of, and a loss
drawing     what is drawn for a seed
comparing   what differs between plain Keras and the pipeline
"""
