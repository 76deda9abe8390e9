"""A step: one mini-batch on its way through the stages.

The algorithm of the paper (section 2.2): the mini-batch is split, each
micro-batch goes forward and backward through all stages, gradients are summed,
and what is left is as if the mini-batch had gone through as a whole:

    split -> tasks in the order of the schedule -> merge

    engine          the loop over the tasks
    running         the stages as they run, functions or inline
    micro_batch     splits, weighs and merges
    exchange        what stages hand to one another
    task_order      one task after another on a device, and their times (clock)
    loss            the loss of the mini-batch from those of micro-batches
    added_losses    those that layers add
    state           merges what layers update, batch statistics and seeds
    masks           Keras masks of outputs, known before the outputs are
    outputs         what the model returns, put together (returned: how)
    row_dependence  how what layers make follows from rows, found by `trials`
"""
