"""The fault-injection matrix of the memory engine: every driver, every operation, every call, every k.

`python -m tests.fault_matrix` prints it. What must hold after each single failure is in `matrix.py`.
"""
