"""Stand in for what files of OpenRLHF and RL4LLM import, so that they run where these systems are not installed."""
