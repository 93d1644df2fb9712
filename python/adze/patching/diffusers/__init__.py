"""Rules for diffusers' modules (rules.py lists them)."""
