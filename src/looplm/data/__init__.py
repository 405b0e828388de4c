"""Text, tokenizers and packed batches."""
