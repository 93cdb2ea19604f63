"""Advantages, aggregation, losses and schedules: pure functions of arrays and floats, one idea per file."""
