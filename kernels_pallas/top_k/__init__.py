"""The best scores of many, as sparse attention chooses what a token attends to."""
