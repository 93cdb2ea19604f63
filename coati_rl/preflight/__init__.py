"""Try what a run depends on before anything starts; nothing here imports Ray."""
