"""Compare mathematical answers with a ground truth."""
