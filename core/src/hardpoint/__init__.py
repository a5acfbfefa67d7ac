"""Hardpoint: an LLM inference engine whose hardware layer is a set of plugins."""
