"""PyTorch's face of a spec: the operator that a user calls, its checks, its derivatives, its kinds of calls."""
