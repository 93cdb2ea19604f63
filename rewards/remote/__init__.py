"""Scoring over HTTP: the service and its client, and reward models that others serve."""
