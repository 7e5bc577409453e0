"""Exit rules: when a token has looped enough."""
