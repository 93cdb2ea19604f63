"""Run a Hugging Face causal language model as a policy: inputs, forward, and copies of earlier weights."""
