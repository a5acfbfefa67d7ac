"""Hardpoint's backend for Huawei Ascend devices.

`descriptor.py` says what it is and finds devices through `driver.py`; `allocator.py` is their memory. `attention.py`, over the metadata of
`step.py`, and `kernels.py` run torch_npu's fused operators, which `operators.py` binds. `platform.py`, `graphs.py` and `collectives.py` are
the core's with what differs here. `capabilities.py` says what all of it can do, and what no hardware has shown yet.
"""
