"""Make batches: what of a group is trained, its samples, and the rows of micro-batches that they are laid out in."""
