"""The pipeline that suits a model and its devices, found and tried.

tune            the arguments of a pipeline, chosen
measured_speeds how fast the devices here are
measured_layers how long layers take on one of them
trials          steps of pipelines that are made to be tried
"""
