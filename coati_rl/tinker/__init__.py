"""Serve Tinker's API: sessions, ordered requests, checkpoints and samplers over HTTP, on models of `core.py`."""
