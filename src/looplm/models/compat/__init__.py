"""Two-way tables between our checkpoints and other families' released layouts."""
