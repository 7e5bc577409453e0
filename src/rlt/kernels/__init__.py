"""Triton kernels of the GPU path.

Every function works on tensors that the caller gives it, never waits for the device, and launches a grid that follows
from shapes alone: all may be captured in a CUDA graph. What is only known on the device (lengths, flags, counts of
rows) ends programs early. With `TRITON_INTERPRET=1`, set before the import, they run on the CPU, in float32.
"""
