"""Numerical operations that several losses share: log-probabilities and entropy, chunked."""
