"""Write metrics, rollouts, timelines and progress of a run."""
