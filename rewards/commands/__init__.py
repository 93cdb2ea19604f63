"""The command line `python -m rewards`: flags flow in, scores or a service flow out."""
