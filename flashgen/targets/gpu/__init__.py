"""What the families of GPUs share: CUDA C++, launches, the model of time."""
