"""Where the rows of chosen experts go, and the tiles that cover them."""
