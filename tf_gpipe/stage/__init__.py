"""A stage: consecutive layers on one device, forward and backward.

Forward, a stage maps the activations of earlier stages to its own outputs;
backward, it maps gradients of its outputs to gradients of its inputs and
weights. Activations that the backward pass reads are kept or recomputed
(rematerialisation, section 2.3 of the paper):

    model_graph -> graph -> pipeline: stages -> function -> phases | tape

    model_graph        the graph of a Keras model, and of models within it
    call_overrides     methods of a model's own; refuses `call` and penalties
    graph              a model as a list of layer calls, which can be cut
    stage, pipeline    the layers of a stage; all stages of a model
    activations        tensors from stage to stage, with masks and logits
    function           the layers as a pure function: state in, state out
    assignments        the scope that records assignments to variables
    loops              variables that are assigned within loops and branches
    straight_through   a tensor whose gradient goes to another one
    matrix_gradient    the gradient of rows of matrices times one matrix
    trace, phases      a trace with the gradient; the phases, cut from it
    phased_call        a micro-batch in the phases; those of its gradient
    read_weights       the weights that the phases read, as one tensor
    recomputed_parts   operations of the trace that are recomputed
    shared_layers      one trace for blocks of layers that are alike
    blocks             repeated blocks of layers
    likeness           comparison of layers by their attributes
    user_code          code that may change something when it is called
    compared_blocks    comparison of blocks by their traces
    same_traces        what a trace computes, without names
    tape               a stage run under a gradient tape: eagerly, and in XLA
    traced_function    parts of a trace as functions of their own
    reached            graph search over operations
    operations         what an operation does: draw numbers, call Python
    function_call      a function that a graph calls many times
    structures         tensors in nested structures
    gradients          sums of gradients of weights over micro-batches
    lookups            sparse gradients of embeddings
    accumulator        sums of tensors, to which functions add in place
    pack               many tensors as one variant tensor
    tensorflow_state   `tf.Variable`s that layers assign as they run
    seeds              random numbers of layers without a seed of their own
    layers_within      layers within layers, built before they run
    no_values          layers built without values for their variables
"""
