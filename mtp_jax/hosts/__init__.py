"""One engine over several processes: rank 0 runs it, the other ranks repeat its launches."""
