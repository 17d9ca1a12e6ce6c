"""Compilers of the system: C++ to a shared library, CUDA to a binary, both through the cache. They know no spec."""
