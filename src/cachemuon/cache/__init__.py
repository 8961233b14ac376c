"""The cached direction: its residual, its repair, the paper's algorithm."""
