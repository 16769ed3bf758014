"""The wrappers of every run and model call of a fixed MODEL: they count, check and rescue."""
