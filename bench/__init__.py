"""What the fix costs: ratios measured against the same model with the fix off. `python -m bench [--full]`."""
