"""What hmp costs, measured beside torch.autocast, plain torch and a hand-written wrapper, in turns, in one process."""
