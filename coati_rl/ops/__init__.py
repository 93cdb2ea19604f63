"""Compute log-probabilities, entropies and losses from the LM head in chunks, for all losses."""
