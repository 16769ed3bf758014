"""Runs that are looked at: sampling, recording, comparing, probing."""
