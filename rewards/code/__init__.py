"""Programs as answers: a response and tests flow in, what the program did in the sandbox decides."""
