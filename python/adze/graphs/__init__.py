"""adze.graph: a module's forward as CUDA graphs, and the module's state that they depend on."""
