"""The process that turns tokens into text."""
