"""A stage: consecutive layers on one device, forward and backward.

It takes what travels between stages and gives what its layers make; backward
it takes gradients by the latter and gives gradients by the former. What the
backward pass needs is kept or recomputed (section 2.3 of the paper,
rematerialisation):

    opening -> graph -> pipeline: stages -> function -> phases | tape

    opening            the graph of a Keras model, and of models within it
    graph              a model as calls of layers, which can be cut
    stage, pipeline    the layers of a stage; all stages of a model
    function           the layers as a pure function: state in, state out
    assignments        what layers assign to variables meanwhile
    phases             its forward, recompute, backward and weights phases
    traced_phases      those phases, cut from one trace of the function
    traced_backward    of them, the backward phase
    recomputed_parts   what of the trace is computed again
    shared_layers      one trace for layers that are alike (likeness)
    blocks             one trace for calls that repeat
    tape               the same by a gradient tape: eagerly, and within XLA
    traced_function    parts of a trace as functions of their own
    reached            what operations lead to
    function_call      a function that a graph calls many times
    gradients          sums of gradients of weights over micro-batches
    lookups            sparse gradients, of embeddings
    accumulator, pack  sums to which functions add in place
    tensorflow_state   `tf.Variable`s that layers assign as they run
    seeds, abstract    the seed that layers share; layers without values
"""
