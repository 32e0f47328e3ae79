"""What hmp costs, measured beside torch.autocast and plain torch in the same process."""
