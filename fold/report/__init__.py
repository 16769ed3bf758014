"""The saturation report: counters, the schema, its words and its chart."""
