"""Compiles the kernels for an H200 where there is none, and reads the compiler's decisions."""
