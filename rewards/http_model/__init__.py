"""Score responses with reward models that are served over HTTP."""
