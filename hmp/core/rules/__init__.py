"""Wrappers: the functions that cast the inputs of an op by its rule, and call the op."""
