"""Rules for transformers' modules (rules.py lists them), and the decoding that transformers compiles."""
