"""How is it computed on this processor or device? GEMM, C++, and which instruction sets they may use."""
