"""Read rows of files: their formats, their rendering into prompts and samples, the order in which they are drawn."""
