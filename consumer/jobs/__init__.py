"""Run training jobs that need no producers: one job per file."""
