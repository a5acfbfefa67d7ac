"""`python -m hardpoint.compat.vllm SCRIPT [ARGUMENTS]` runs a script in which `import vllm` means Hardpoint."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from hardpoint.compat.vllm import stand_in


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m hardpoint.compat.vllm SCRIPT [ARGUMENTS]")
    stand_in()
    for_children = str(Path(__file__).parent / "for_children")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [for_children, os.environ.get("PYTHONPATH")]))
    script = sys.argv[1]
    del sys.argv[0]
    # As Python does it for a script.
    sys.path[0] = str(Path(script).resolve().parent)
    # What multiprocessing spawns gets this process's path instead of PYTHONPATH.
    sys.path.insert(1, for_children)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
