"""Checkpoints of a training run, from which it goes on to the same bits.

store    checkpoints in a directory: written whole, with checksums, or not
lock     one process at a time writes there
state    all that a step changes, copied where it is and put back
writer   writes them beside the training, one at a time
data     whether data can be taken up again, and how it is
"""
