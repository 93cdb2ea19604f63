"""Ask reward models that others serve over HTTP."""
