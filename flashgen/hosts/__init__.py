"""What loads and starts kernels: the CPU, a GPU, and the emulator, which runs kernels for GPUs on the CPU."""
