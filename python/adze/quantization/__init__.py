"""Models with weights in fewer bits: the layer that has them, adze.quantize, checkpoints of other formats."""
