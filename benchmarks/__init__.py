"""The cost of hmp, against torch.autocast, plain torch and a hand-written wrapper, measured in turns in one process."""
