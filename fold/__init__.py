"""MOSS-Image in fp16: the numerics, on torch and safetensors alone. ``python -m fold`` is the command line."""
