"""Read and write checkpoints for resuming a run: directory, format, position in the data, untrained rollouts."""
