"""Try, on small models with random weights, whether trainers compute an architecture right, before a job starts."""
