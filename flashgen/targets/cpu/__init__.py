"""The family of CPUs: C++ that the host's compiler makes a shared library of."""
