"""A link: one authenticated, ordered, framed connection between two processes."""
