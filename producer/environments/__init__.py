"""Run tasks with an engine: an environment turns a task into trajectories; a single turn is the default."""
