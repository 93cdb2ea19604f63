"""Train low-rank adapters of a model's linear layers in place of its weights."""
