"""Turn rows into prompts, and trajectories into the rows of micro-batches, without Ray or an engine."""
