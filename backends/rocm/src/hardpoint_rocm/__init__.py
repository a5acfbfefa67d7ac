"""Hardpoint's backend for AMD devices.

`descriptor.py` says what it is and finds devices through `driver.py` in the library that `libraries.py` finds, `capabilities.py` what
it claims for them; `allocator.py` is their memory, `attention.py` the core's Triton kernels.
"""
