"""Answers of mathematics: response and ground truth flow in, a verdict flows out."""
