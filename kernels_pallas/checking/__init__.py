"""What the kernels are held against: cases, the tools that lower, compile, verify and time them."""
