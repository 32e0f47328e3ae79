"""Patches of torch's Python code around ops: optimizers, backward, checkpoints, construction and calls of modules."""
