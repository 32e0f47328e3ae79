"""What low precision does to the numbers: every op compared with float32, and the first op that makes NaN or Inf."""
