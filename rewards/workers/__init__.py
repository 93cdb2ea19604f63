"""Scoring in processes of their own: groups of responses flow in, scores flow out, each within its time."""
