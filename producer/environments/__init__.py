"""Run tasks with an engine: an environment generates a task's trajectories; a single turn is the default."""
