"""Define what a trainer optimises: one objective per file."""
