"""The layout of rows by chosen expert, and the tiles that cover the rows."""
