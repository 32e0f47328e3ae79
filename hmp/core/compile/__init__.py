"""Code made by torch.compile and strict torch.export has the casts of eager code."""
