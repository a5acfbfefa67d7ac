"""Hardpoint's CPU backend: native paged attention, packed linear layers and a fused decoder, on any x86-64 or other host.

Found through the entry-point group `hardpoint.backends`; nothing here is imported by the core.
"""
