"""What stands around every run and model call of a fixed MODEL: counting, checking, rescuing."""
