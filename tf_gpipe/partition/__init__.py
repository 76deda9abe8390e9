"""Which layers form which stage: cuts that balance cost (section 2.1).

balanced     the cut of a graph into stages that cost nearly the same
contiguous   the best cut of a sequence of costs, by dynamic programming
layer_costs  what calls of layers do and keep, found by tracing them
stage_costs  the same for stages
passing      what operations hold on their way, at most
tensor_memory what tensors of a graph take, and which share it
flops        floating-point operations of a graph (cudnn: of recurrent layers
             on GPUs, and what these keep)
recomputed   what a stage keeps and computes, whichever layers it recomputes
auto_remat   those that it recomputes to fit, and the cut for that
memory_limit what a device may take (sizes: bytes, as people write them)
uncounted    what is said of a layer whose costs cannot be found
lopsided     what is said of layers that make a cut uneven
config       the arguments of a pipeline, checked
"""
