"""The commands of `python -m tf_gpipe`, and the modules that they share.

plan       memory and time of a pipeline (pareto: time against memory)
tune       the arguments of the fastest pipeline that fits
timeline   when each device runs which task (recording: measured in training)
verify     compares a pipeline with the plain Keras model
worker     a process that runs stages for other processes
workers    runs a command with worker processes on this host
supervise  runs a program, and restarts it when it dies

models     makes the model named on the command line, and random data
devices    devices of this host
flags      flags that commands share (parser: errors that suggest a name)
start      imports TensorFlow late, without the lines that it logs
"""
