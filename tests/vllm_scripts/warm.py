"""`python -m tests.vllm_scripts.warm FOLDER SCRIPT...` writes their models into the cache (HF_HUB_CACHE), and runs each script in a process
of its own, forked from this one.

A fork has torch and this engine imported, which would take most of a short script's time, and so have its ranks; it shares nothing else.
What it printed and what became of it is written to FOLDER, one JSON file for each script.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import sys
import threading
import traceback
import weakref
from pathlib import Path

from tests.vllm_scripts.models import write_cache
from tests.warm_processes import WarmPopen, children_by, freeze, import_engine, start_server

SECONDS = 240
"""Most time that a script may take."""


def _run(script: Path, report: Path) -> None:
    """Run a script as Python does, in a folder of its own; never returns."""
    signal.alarm(SECONDS)  # ends the process
    work = report.with_suffix("")
    work.mkdir()
    os.chdir(work)
    with open("output", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = [str(script)]
    sys.path[0] = str(script.parent)
    start_server()
    error: BaseException | None = None
    try:
        with children_by(WarmPopen):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        error = ended if ended.code else None
    except BaseException as raised:
        error = raised
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    kinds = [] if error is None else [kind.__name__ for kind in type(error).__mro__]
    result = {
        "kinds": kinds,
        "said": "" if error is None else str(error),
        "output": Path("output").read_text("utf-8", "replace"),
    }
    report.with_suffix(".part").write_text(json.dumps(result))
    report.with_suffix(".part").rename(report)
    os._exit(0)


def main() -> None:
    """Import what scripts need, and fork for each."""
    folder, *scripts = map(Path, sys.argv[1:])
    gc.disable()  # what is imported stays

    import llguidance  # noqa: F401
    import torch.profiler  # noqa: F401
    import transformers.models.auto.tokenization_auto
    import transformers.models.llama.modeling_llama
    import transformers.processing_utils
    import transformers.utils.chat_template_utils  # noqa: F401
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    import hardpoint.engine.async_llm  # noqa: F401
    from hardpoint.compat.vllm import stand_in
    from hardpoint.plugins import installed

    import_engine()
    stand_in()
    installed().records("cpu")
    # At its end torch takes its operators' kernels out of their tables, one by one: 7000 pages that each fork would copy.
    for finalizer, info in weakref.finalize._registry.items():  # type: ignore[attr-defined]
        if info.func.__module__ == "torch.library":
            finalizer.atexit = False
    # A thread would be missing in a fork, with whatever it holds.
    assert threading.active_count() == 1, threading.enumerate()
    freeze()
    writer = os.fork()  # for which models are computed, and so threads are made
    if not writer:
        write_cache(Path(os.environ["HF_HUB_CACHE"]))
        os._exit(0)
    assert os.waitpid(writer, 0)[1] == 0
    for script in scripts:
        report = folder / f"{script.stem}.json"
        process = os.fork()
        if not process:
            _run(script, report)
        _, status, usage = os.wait4(process, 0)
        result = (
            json.loads(report.read_text())
            if report.exists()
            else {"kinds": ["Killed"], "said": f"ended with status {status}", "output": ""}
        )
        report.write_text(json.dumps(result | {"cpu_seconds": usage.ru_utime + usage.ru_stime}))


if __name__ == "__main__":
    main()
