"""C++, Triton and CUDA kernels, their loading and choice, and the instruction sets that they may use."""
