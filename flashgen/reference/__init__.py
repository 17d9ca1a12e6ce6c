"""Attention straight from the IR, in PyTorch: the judge of every backend, the fallback, and the paper's algorithms."""
