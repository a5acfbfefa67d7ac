"""Scripts in the shapes that vLLM's users write, and what becomes of each with `vllm` answered by `hardpoint.compat.vllm`.

`scripts/` has the scripts, which know nothing of Hardpoint. `python -m tests.vllm_scripts` runs them and writes docs/vllm-features.md.
"""
