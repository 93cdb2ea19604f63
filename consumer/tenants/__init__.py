"""Train many models at once: sets of adapters of one frozen base, and whole copies of it."""
