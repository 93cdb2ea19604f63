"""Rehearse a command on the CPU before it is started: the real preparation, then a small run of the real driver."""
