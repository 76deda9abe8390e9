"""Checkpoints of a training run, which resumes with bitwise equal results.

store            checkpoints in a directory, each written whole, or not
lock             a lock file: one process at a time writes there
model_variables  the variables of a model that a step may change
state            these variables, copied on their hosts and restored
writer           a thread that writes checkpoints while the training goes on
data             the data of a resumed run: batches already used are skipped
"""
