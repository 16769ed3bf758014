"""The fold: its factors, what they do to the streams at run time, in weights and in a file's record."""
