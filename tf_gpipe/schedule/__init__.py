"""Pipeline schedules as data (section 2.3 of the paper).

A schedule is an ordered list of tasks for each device: forward (F), recompute
(R), backward (B) and weights (W) of a stage and a micro-batch. `step.engine`
runs this list; here its bubble is simulated, its memory computed, and it is
drawn:

    device 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3
    device 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..

    tasks        Task and Schedule; dependencies between tasks
    schedules    schedules by their names; that of GPipe
    one_f_one_b  1F1B, and the schedules that are made from its order
    v_schedules  schedules whose stages go down the devices and back up
    simulate     start and end of each task, bubble, micro-batches kept
    memory       peak memory of activations
    listing      list scheduling: orders by priority rules
    search       schedule "auto": a search for the shortest order
    timeline     charts of a step: text, Chrome trace, image
    page         interactive charts of steps, as an HTML file
    step_files   the files that a step is drawn in, checked before it runs

Pure Python: TensorFlow is not imported here.
"""
