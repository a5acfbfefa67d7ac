"""Hardpoint's backend for AMD devices.

`descriptor.py` says what it is and finds devices through `driver.py`, `capabilities.py` what it claims for them; `allocator.py` is their
memory, `attention.py` the core's Triton kernels, `worker.py` a rank, `graphs.py` captured steps, `collectives.py` RCCL.
"""
