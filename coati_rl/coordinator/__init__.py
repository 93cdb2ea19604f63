"""Manage the data of a run: leased prompts, finished groups, the trainers' next work; without Ray."""
