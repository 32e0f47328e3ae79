"""Bridges to what people have: Habana's packages, Optimum's configuration, transformers and Lightning."""
