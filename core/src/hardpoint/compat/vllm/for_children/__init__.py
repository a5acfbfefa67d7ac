"""A folder for the PYTHONPATH of processes that a script starts: the module `vllm` in it leads to `hardpoint.compat.vllm`."""
