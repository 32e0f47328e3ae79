"""Reversible patches of torch: functions are put in the places of torch's own, and torch's own put back. Knows nothing of casts."""
