"""Each op of a policy's run compared with float32: compare()."""
