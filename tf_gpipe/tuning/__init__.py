"""The fastest pipeline for a model and its devices, measured and tried.

tune            `tf_gpipe.tune`: chooses the arguments of a pipeline
arguments       the arguments of `tune`, checked
measured_speeds measured speed of this machine's devices and connections
measured_layers measured seconds of layer calls on a device
trials          measured seconds of training steps of a copied model
tried_choices   which choice is tried next, and what the trials say of others
"""
