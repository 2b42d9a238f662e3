def suite_of_inputs(models, participants, curvatures, *, device="auto"):
    return None
