"""Distribute a model over the trainers: layouts, shards, pipeline stages, and reductions over ranks."""
