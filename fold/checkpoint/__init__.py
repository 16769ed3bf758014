"""MOSS-Image files: header, key layouts, reading, loading and streamed export."""
