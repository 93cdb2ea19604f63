"""Run a Hugging Face causal language model as a policy: its inputs, its forward, its weights of earlier versions."""
