"""Recompute an optimizer step of a run from its files, stage by stage, with plain transformers on one CPU process."""
