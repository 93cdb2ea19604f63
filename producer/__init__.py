"""The rollout service: Ray actors around an inference engine that turn leased prompts into scored rollout groups."""
