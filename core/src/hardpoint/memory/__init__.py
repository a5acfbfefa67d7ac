"""Device memory: what every backend shares beneath its allocator.

Here live the opening of vendors' driver libraries and the Python face of the virtual-memory engine. Importing this package
imports neither torch nor a driver; what a particular device needs lives in its backend.
"""
