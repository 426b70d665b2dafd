"""Cases of the kernels, and the tools that lower, compile, verify and time them."""
