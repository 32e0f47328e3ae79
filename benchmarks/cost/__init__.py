"""What hmp costs: a module for each question."""
