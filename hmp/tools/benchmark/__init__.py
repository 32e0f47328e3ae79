"""benchmark(): the user's own training step in several precisions, as one table."""
