"""What shows, compares and searches."""
