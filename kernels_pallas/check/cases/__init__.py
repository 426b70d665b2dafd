"""The cases of each kernel: shapes at which it is checked, compiled and timed."""
