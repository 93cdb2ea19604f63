"""Score groups of responses in worker processes, each response within its time limit."""
