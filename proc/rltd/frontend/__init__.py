"""The HTTP process; never imports torch."""
