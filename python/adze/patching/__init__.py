"""adze.patch and adze.verify: the frame, fingerprints of sources, and rules for torch, transformers and diffusers."""
