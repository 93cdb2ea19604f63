"""Generate rollouts: Ray actors with an inference engine turn leased prompts into scored rollout groups."""
