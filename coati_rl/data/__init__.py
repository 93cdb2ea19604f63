"""Prompts in, training batches out: dataset, leases, slots, schedule and batch assembly, all without Ray."""
