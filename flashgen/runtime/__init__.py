"""From generated source to a PyTorch operator: cache, compiler, loader, ``torch.library`` registration."""
