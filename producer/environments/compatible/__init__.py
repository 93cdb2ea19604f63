"""Run agents and environments that were written for RL2, RL4LLM and OpenRLHF as episodes."""
