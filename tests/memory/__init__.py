"""Behaviour of the memory engine on every driver of the workspace: the CPU's, and the vendors' over simulated libraries."""
