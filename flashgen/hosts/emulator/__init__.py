"""The emulator: generated CUDA source, compiled by the host's compiler and run on host memory.

What it checks and counts is described in templates/emulator/machine, one file for each part of the machine.
"""
