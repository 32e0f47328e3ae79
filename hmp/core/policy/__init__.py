"""List files and their entries, policies made of them, and what a policy's scoped entries mean for a model."""
