"""EAGLE-3 heads: one layer over hidden states from inside the trunk, which drafts by recursion."""
