"""Programs with the structure of the originals' guides, tutorials and examples, each with one changed import."""
