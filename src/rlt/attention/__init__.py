"""Attention back ends over paged key/value storage."""
