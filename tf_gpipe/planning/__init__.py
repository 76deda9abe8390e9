"""What a pipeline will need, told before anything of it is allocated.

planner        the plan for arguments that are given
choice         the plan of the best pipeline, and of the next best
candidates     what there is to choose from
drafts         a candidate on devices: its cut, its times and its plan
cuts           cuts whose stages fit their devices
estimates      bytes, bubble and step time where all is decided
layer_times    how long layers take on a device
speeds         how fast devices are
known_layers   the layers without values, and what they do
planned_graph  the model with all sizes and no values
optimizers     the optimizer whose slots are planned
plans          what a plan tells, as data
plan_table     a plan as people read it
plan_files     plans in files
"""
