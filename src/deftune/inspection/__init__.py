"""The inspector: rows and tokens of a dataset that contradict a model, in a terminal and as an HTML page."""
