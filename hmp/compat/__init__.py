"""Bridges to other libraries: Habana's packages, Optimum's Gaudi configurations, transformers and Lightning."""
