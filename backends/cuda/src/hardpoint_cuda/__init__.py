"""Hardpoint's backend for NVIDIA devices.

`descriptor.py` says what it is and finds devices through `driver.py`, `capabilities.py` what it claims for them; `allocator.py` is their
memory, `attention.py` the core's Triton kernels, `collectives.py` NCCL.
"""
