"""The work between the queries' product and absorbed attention: a rotation, and the keys' up-projection."""
