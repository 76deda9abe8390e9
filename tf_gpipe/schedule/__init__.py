"""When each device runs what: schedules as data (section 2.3 of the paper).

A schedule is a list of tasks a device: forward (F), recompute (R), backward (B)
and weights (W) of a stage and a micro-batch. The same list is run by
`step.engine`, simulated for its bubble, counted for its memory, and drawn:

    device 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3
    device 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..

    tasks        what a task and a schedule are, and the order of their tasks
    schedules    those that have names: gpipe, 1f1b, zero_bubble, ...
    v_schedules  of them, those that go down the devices and back up
    simulate     the times of tasks, the bubble, how much is kept
    memory       what activations need at their peak
    listing      orders that are made by a rule
    search       the best of them for the stages at hand
    timeline     pictures of what was simulated or measured
    page         the same to zoom into, as an HTML file

Pure Python: TensorFlow is not imported here.
"""
