"""Attention straight from the IR, in PyTorch: the judge of every backend, and the fallback."""
