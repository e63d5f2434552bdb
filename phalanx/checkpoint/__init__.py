"""Everything that is saved and restored: one module for each format."""
