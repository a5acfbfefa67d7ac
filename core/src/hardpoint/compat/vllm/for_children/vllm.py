"""What `import vllm` finds in processes that a script starts: `python -m hardpoint.compat.vllm` puts this folder on their PYTHONPATH."""

import sys

from hardpoint.compat.vllm import stand_in

del sys.modules["vllm"]  # this module itself
stand_in()
