"""Serve the policy to programs that speak OpenAI's API, and record an agent's episodes token by token."""
