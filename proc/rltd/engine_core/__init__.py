"""The process that owns the model."""
