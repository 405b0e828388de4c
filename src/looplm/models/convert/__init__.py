"""Models made from other models: the same weights under another architecture."""
