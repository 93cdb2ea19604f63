"""Read and write what a run is resumed from: the directory, its format, the run's position, untrained rollouts."""
