"""Define advantages, aggregation and losses as pure functions of arrays and floats, one idea per file."""
