"""The workloads of every side: models, their networks, and the known differences of the sides."""
