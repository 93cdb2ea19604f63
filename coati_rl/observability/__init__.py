"""What a person sees: logs, metrics, rollouts, progress."""
