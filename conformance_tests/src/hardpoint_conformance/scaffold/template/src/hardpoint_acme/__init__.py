"""Hardpoint's backend for Acme devices: `descriptor.py` says what it is, and each other file is one of its parts."""
