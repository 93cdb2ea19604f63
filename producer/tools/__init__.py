"""Give episodes tools: parse calls from the policy's answers, run them, and return their results as messages."""
