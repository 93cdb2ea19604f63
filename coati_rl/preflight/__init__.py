"""Read, check and plan a job before anything starts: its data, models, memory, layout and places."""
