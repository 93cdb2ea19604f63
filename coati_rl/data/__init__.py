"""Turn rows into prompts, and trajectories into the rows of micro-batches; no Ray and no engine in it."""
