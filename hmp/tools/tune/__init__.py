"""The search for op lists: tune()."""
