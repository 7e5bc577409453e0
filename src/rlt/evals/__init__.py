"""Tasks with checkable answers, and the measurements made with them."""
