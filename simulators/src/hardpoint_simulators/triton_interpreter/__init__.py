"""A backend that runs the core's Triton attention in Triton's interpreter, on the host: what the kernels compute, without their device.

What belongs here: its descriptor, a small memory, and graphs that record calls. It has no worker: nothing but kernels is simulated. The
interpreter tells nothing of compilation, of races between threads, of alignment or of speed.
"""
