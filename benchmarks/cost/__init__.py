"""The cost of hmp, a module for each question."""
