"""The commands of `python -m tf_gpipe`, and what they share.

plan       what a pipeline will need (pareto: its time against its memory)
tune       the arguments of the fastest pipeline that fits
timeline   when each device runs what (recording: a model that is trained)
verify     a pipeline against the plain Keras model
worker     a process that runs stages for other processes
workers    a command with workers on this host
supervise  a program that is started again when it dies

models     models that are named on the command line
devices    devices of this host
flags      flags that commands share (parser: what was meant by a wrong one)
start      TensorFlow, imported late and without its logs
"""
