"""Conformance checks that every backend must pass, in this tree or outside of it.

Level 0, packaging and contract: the descriptor is imported without heavy libraries, and what it describes keeps to the contract.
A check raises `NotConformant`, which lists everything that it found; nothing here is specific to a backend.
"""

from hardpoint_conformance.packaging import NotConformant, check_contract, check_descriptor_imports_light

__all__ = ["NotConformant", "check_contract", "check_descriptor_imports_light"]
