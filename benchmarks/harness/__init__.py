"""Timing, checks, comparisons and reports."""
