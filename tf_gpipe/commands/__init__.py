"""The commands of `python -m tf_gpipe`, and what they share."""
