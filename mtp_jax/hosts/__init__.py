"""One engine over several processes: rank 0 runs it, the others repeat what it launches."""
