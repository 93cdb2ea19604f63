"""Own the data of a run: which prompts are leased, which groups are finished, what trainers do next; without Ray."""
