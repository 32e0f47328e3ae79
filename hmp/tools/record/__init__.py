"""What ran in which precision: record() and its report."""
