"""Mutation testing of the core of hmp: `python -m tests.support.mutation` says how much of a changed core its tests notice."""
