"""The first op that made NaN or Inf: detect_nonfinite()."""
