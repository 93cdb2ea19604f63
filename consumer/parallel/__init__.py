"""Distribute a model over the trainers: layouts, shards, pipeline stages, the reductions over ranks."""
