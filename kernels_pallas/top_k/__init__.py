"""The choice of the best scores, by which sparse attention chooses the rows that a token attends to."""
