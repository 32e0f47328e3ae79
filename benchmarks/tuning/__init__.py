"""The value of hmp.tune(): its lists against float32, torch.autocast's and Habana's, on small tasks that models learn."""
