"""Devices, replicas and worker processes.

placement   the device of each stage and of its variables
local       splits this machine's CPU into several devices
sharing     devices for a saved model on a machine that lacks its own
replicas    several pipelines under a `tf.distribute` strategy
slots       an optimizer's slots, on the devices of their weights
colocation  operations outside of the pipeline, on their inputs' devices
cluster     connects to worker processes
worker_lost errors that name the lost worker
watcher     the client's record of dead and silent workers
heartbeat   the process that asks workers, and ends calls that wait for one
fail_fast   environment variables of TensorFlow's connections to workers
restart     restarts a worker process once no program uses it
listening   restricts a TensorFlow server to one IP address
sockets     the sockets of this process, also those that TensorFlow opened
functions   functions that are not inlined, whose errors reach the caller
errors      notes on errors of a stage's operations: the layer and the stage
"""
