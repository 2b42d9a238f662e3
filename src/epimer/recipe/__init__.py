"""A merge as a YAML file in mergekit's dialect."""
