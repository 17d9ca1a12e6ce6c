"""The emulator: generated CUDA source, compiled by the host's compiler and run on host memory."""
