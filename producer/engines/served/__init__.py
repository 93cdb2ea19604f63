"""Use a vLLM server that somebody else started as a generation engine, over HTTP (docs/decisions/0069)."""
