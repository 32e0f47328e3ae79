"""What hmp.tune() is worth: its lists against float32, torch.autocast's and Habana's, on small tasks that are really learnt."""
