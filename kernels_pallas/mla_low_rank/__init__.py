"""The work between MLA's low-rank projections and their readers: norms, a rotation, the cache write."""
