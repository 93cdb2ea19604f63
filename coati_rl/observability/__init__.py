"""Show a person logs, metrics, rollouts, progress."""
