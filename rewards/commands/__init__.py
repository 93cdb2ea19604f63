"""Implement the command line `python -m rewards`."""
