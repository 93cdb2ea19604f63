"""Run the jobs of a trainer: models, objective, and what happens besides steps; one per file."""
