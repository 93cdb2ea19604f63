"""The parts of scripts/gpu_check.py: what a machine has, what is run on it, each check in a process of its own.

`plan`, `peaks` and `runner` need the standard library alone; everything that imports torch runs in a child.
"""
