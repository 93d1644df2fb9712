"""adze.compile: a pass over Inductor's graph, the chains that it replaces, and rope."""
