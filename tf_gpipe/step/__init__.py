"""A step: forward and backward passes of one mini-batch through all stages.

The algorithm of the paper (section 2.2): the mini-batch is split, each
micro-batch goes forward and backward through all stages, and gradients are
summed. The result is that of the mini-batch in one piece:

    split -> tasks in the order of the schedule -> merge

    engine            the loop over the tasks
    running           the stages of this step, as functions or inline
    micro_batch       splits a mini-batch, weighs micro-batches, merges results
    exchange          activations and gradients sent between stages
    task_order        control dependencies between the tasks of a device; clock
    loss              the loss of a mini-batch from those of its micro-batches
    loss_checks       refuses losses that need the whole mini-batch
    added_losses      losses that layers add, merged over micro-batches
    penalties         losses of regularisers, on the devices of their weights
    state             state that layers update, merged over micro-batches; seeds
    batch_statistics  moving statistics of batch normalisation, merged
    masks             Keras masks of outputs, computed before the outputs
    outputs           the model's outputs, merged from micro-batches
    row_dependence    how outputs and losses depend on the rows of a batch
    dependence        that of a value, judged by its values for some batches
    made_up_batches   layers and losses run on made-up batches
    made_up_numbers   the numbers of these
"""
