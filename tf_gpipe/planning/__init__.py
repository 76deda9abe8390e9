"""Memory and time of a pipeline, predicted before anything is allocated.

planner        `tf_gpipe.plan`: the plan for given arguments
choice         the fastest plans among all candidates
candidates     the combinations of arguments that are compared
drafts         a candidate placed on devices: its cut, times and plan
cuts           cuts whose stages fit the memory of their devices
estimates      bytes, bubble and step time for decided arguments
layer_times    seconds of the passes of each layer on a device
speeds         FLOPs and bytes a second of devices and connections
known_layers   copies of the layers without values, and their costs
layer_copies   copies of layers, as far as their configs make them
planned_graph  the model's graph with all sizes known and no values
optimizers     the optimizer whose slots are planned
plans          `Plan`, the result, as data
plan_table     a plan as a table of text
plan_files     a plan in a JSON file
"""
