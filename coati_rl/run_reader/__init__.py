"""Read what a run has written, while it goes on, after its end, and after it was broken off."""
