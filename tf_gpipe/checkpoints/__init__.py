"""Checkpoints of a training run, which resumes with bitwise equal results.

store    checkpoints in a directory: written whole, with checksums, or not
lock     a lock file: one process at a time writes there
state    the variables that a step changes, copied on their hosts and restored
writer   a thread that writes checkpoints while the training goes on
data     the data of a resumed run: batches already used are skipped
"""
