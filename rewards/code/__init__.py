"""Score answers that are programs by running their tests in the sandbox."""
