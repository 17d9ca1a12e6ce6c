"""Digests of kernels, before and after a change that must leave machine code as it was. See ``command.py``."""
