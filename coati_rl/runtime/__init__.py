"""Start Ray, place and supervise the actors of a run, call them with deadlines, and end them cleanly."""
