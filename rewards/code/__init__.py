"""Score programs as answers, by what they do in the sandbox with their tests."""
