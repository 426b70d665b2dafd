"""DSpark stages of DeepSeek-V4: a head that drafts blocks, among the model's own tensors."""
