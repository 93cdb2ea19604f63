"""The training service: Ray actors on ColossalAI that turn training batches into policy updates and send them out."""
