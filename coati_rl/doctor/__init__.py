"""Check a machine before runs, and name the causes of what a run's files show."""
