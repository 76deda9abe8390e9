"""What a pipeline will need, told before anything of it is allocated.

planner        FLOPs, bytes, bubble and step time of each stage
planned_graph  the model with all sizes and no values
plans          what a plan tells, as data and as a table
"""
