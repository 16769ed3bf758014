"""What a model call would do on a card that is not here, counted on fake tensors: kernels, bytes, memory, waits."""
