"""What is known of a MODEL: its modules by name, what other packs put on it, the fold its file carries."""
