"""The operators: what the native part says of its ops, one function per op, and fake functions for torch.compile."""
