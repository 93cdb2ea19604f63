"""Judge answers of mathematics against a ground truth."""
