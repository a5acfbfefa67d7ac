"""Hardpoint's backend for NVIDIA devices.

`descriptor.py` says what it is and finds devices through `driver.py`. This version runs nothing on them: its capabilities are
empty, and it reports itself as unavailable.
"""
