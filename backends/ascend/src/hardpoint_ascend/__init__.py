"""Hardpoint's backend for Huawei Ascend devices.

`descriptor.py` says what it is and finds devices through `driver.py`; `allocator.py` is their memory. This version has no attention and
no worker, and reports itself as unavailable.
"""
