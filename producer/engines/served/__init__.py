"""Use a server of vLLM or SGLang that somebody else started as a generation engine (docs/decisions/0069, 0085)."""
