"""Score on another machine over HTTP: the service, its client, and the form of scores between them."""
