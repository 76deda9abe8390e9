"""Programs that train models from `model_zoo` with `tf_gpipe`."""
