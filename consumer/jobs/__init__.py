"""Compose trainers for jobs without producers: one job per file."""
