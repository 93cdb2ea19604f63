"""Show runs as a web page: one file for others, or served from a run's files while it goes on."""
