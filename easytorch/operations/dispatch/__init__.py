"""How a call finds its implementation: the classes of operations, their registry, settings and results."""
