"""Start processes of this machine, end them with their parent, and let them call it."""
