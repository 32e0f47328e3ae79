"""The version of hmp, for its package and for what its tools write."""

__version__ = "0.1.0"
