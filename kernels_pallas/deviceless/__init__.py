"""Compilation of the kernels for an H200 on a machine without one, and the compiler's decisions."""
