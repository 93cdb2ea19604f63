"""Start the processes of a run, and give them environment, cores, log, calls, heartbeats, interrupts and an end."""
