"""MOSS-Image: one forward over any module tree with the official names, and the built-in modules."""
