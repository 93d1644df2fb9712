"""Attention "adze" for transformers, adze.Cache, and adze.generate."""
