"""What is run on every side: models, the networks they are made of, and where the sides are known to differ."""
