"""Score responses with a reward model of one label, in batches over concurrent requests.

A `RequestBatcher` owns the model: in an actor of its own in a run, or in this process for `python -m rewards`. A
`ModelScorer` asks it, and converts its numbers to scores. Importing this package imports neither torch nor Ray.
"""
