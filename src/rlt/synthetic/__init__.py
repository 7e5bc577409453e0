"""Synthetic checkpoints: the published shapes with generated weights, for benchmarks without the real ones."""
