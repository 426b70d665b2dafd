"""The best scores of many, as sparse attention chooses the rows that a token attends to."""
