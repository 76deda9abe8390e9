"""Which layers form which stage: cuts that balance cost (section 2.1).

balanced     the cut of a graph into stages that cost nearly the same
contiguous   the best cut of a sequence of costs, by dynamic programming
call_costs   FLOPs and bytes of a layer call, from a trace without weights
layer_costs  those of all layer calls of a graph
measured_calls measured seconds of layer calls
stage_costs  FLOPs and bytes of stages, summed over their layer calls
peak_memory  peak bytes of the intermediate tensors of a graph's operations
tensor_memory sizes of a graph's tensors, and which of them share memory
flops        FLOPs, memory traffic and kernel counts of a graph's operations
cudnn        shapes of the tensors that cuDNN's recurrent layers keep
parameter_bytes bytes of stages' weights, their gradients and slots
recomputed   bytes and time of each choice of layers that a stage recomputes
fitted_remat what the stages of a cut recompute, to fit into memory
auto_remat   remat="auto": the cut whose slowest stage is fastest then
memory_limit the `memory_limit` of a device
sizes        bytes, parsed from strings such as "16GB"
uncounted    the error for a layer whose costs cannot be found
lopsided     warnings and errors about layers that make a cut uneven
config       the arguments of a pipeline: checked, then resolved
"""
