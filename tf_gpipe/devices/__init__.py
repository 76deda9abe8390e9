"""Where things are: devices, replicas, worker processes.

placement   which device each stage is on, its variables too
local       the CPU of this machine, as several devices
sharing     the same for a saved model, where its devices are not
replicas    several pipelines under a `tf.distribute` strategy
slots       what an optimizer keeps of a weight, beside the weight
colocation  what runs outside of the pipeline, where its operands are
cluster     connecting to worker processes
worker_lost which worker is gone, told by every call that needs it
watcher     what this process knows of its workers
clients     when programs last used a worker, which starts anew without
fail_fast   what their connections read in the environment
heartbeat   the process that asks them, and ends what waits for one
listening   the one address that a TensorFlow server answers on
sockets     those of this process, also of TensorFlow
errors      which stage and layer an error on a device was raised by
"""
