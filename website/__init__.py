"""The documents as a static site: `python -m website OUT`, or `make docs`."""
