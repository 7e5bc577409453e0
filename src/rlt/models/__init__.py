"""Model families: maths, tensor names, checkpoint reading."""
