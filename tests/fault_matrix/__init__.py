"""The fault-injection matrix of the memory engine: every driver, every operation, every call, every k, and pairs of calls.

`python -m tests.fault_matrix` prints it. What must hold after each failure is in `hardpoint_conformance.fault_matrix`.
"""
