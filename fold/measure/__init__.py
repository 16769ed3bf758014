"""Running the model to measure it: sampling, recording, comparing, probing."""

#: Flow-GRPO's own noise level for training rollouts.
NOISE_LEVEL = 0.7
