"""A file into a MODEL: ComfyUI's own class where it has one, else the built-in one."""
