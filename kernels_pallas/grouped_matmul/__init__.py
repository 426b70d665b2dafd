"""Matrix products whose rows belong to groups with weights of their own: a mixture's experts."""
