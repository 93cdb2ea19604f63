"""Run a command from a terminal: its plan or its launch, the watch over its actors, its records and its end."""
