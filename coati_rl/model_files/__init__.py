"""Check a model directory before anything starts: its weight files, its values, and whether it can be saved again."""
