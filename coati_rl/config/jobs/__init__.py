"""Define the jobs on a dataset, one in each file: settings, rows, the names of its samples and its objective."""
