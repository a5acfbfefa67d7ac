"""Ctrl-C at a random moment of a command, its imports included: one line, status 130, and nothing of it is left."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import termios
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from hardpoint.cli.exit_codes import ExitCode

TOO_EARLY = 77
PROGRAM = f"""
import os, signal
signal.signal(signal.SIGINT, lambda *_: os._exit({TOO_EARLY}))  # Python's own start is not the command's
from hardpoint.cli import main
main()
"""
ORDINARY = re.compile(r".* on cpu|cpu on |L\d: |. Loading |.*\d/\d")
"""Lines that commands write anyway."""
MARK = "HARDPOINT_TEST_OF_INTERRUPTS"

ENGINE = ("--num-blocks", "16", "--max-model-len", "64")
COMMANDS = {
    "generate": ("generate", "--prompt", "hello", "--max-tokens", "40", "--ignore-eos"),
    "engine process": ("generate", "--prompt", "hello", "--max-tokens", "40", "--engine-process"),
    "chat": ("chat", "--max-tokens", "6"),
    "bench": ("bench", "throughput", "--num-prompts", "8", "--input-len", "9", "--output-len", "9"),
    "conformance": ("conformance", "run", "--backend", "cpu", "--clause", "alloc.address.stable@1"),
}


@dataclass(frozen=True)
class Ended:
    """How a command ended: its status, standard error, and what it took."""

    code: int
    err: str
    cpu: float
    seconds: float


def write_model(file: Path) -> str:
    """Write a model of one layer whose tokens are bytes; as GGUF, which is read without transformers. Returns the file."""
    tokens = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), "he"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * 257)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    generator = np.random.default_rng(0)
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", generator.normal(size=(len(tokens), 64)).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", generator.normal(0, 0.1, (64, 64)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has taken: how far it is, whatever else the machine does."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def left(mark: str) -> list[str]:
    """Return the command lines of the processes of a trial."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def run(name: str, model: str, *, cpu: float = 1e9, seconds: float = 1e9) -> Ended:
    """Run a command whose standard error is a terminal, and press Ctrl-C when it has run for so long; nothing of it may be left."""
    options = () if name == "conformance" else ("--model", model, "--dtype", "float32", *ENGINE)
    mark, written = uuid.uuid4().hex, bytearray()
    master, slave = os.openpty()
    attributes = termios.tcgetattr(slave)

    def read() -> None:
        with suppress(OSError):  # the terminal's end
            while data := os.read(master, 4096):
                written.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    start, used = time.monotonic(), 0.0
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *COMMANDS[name], *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=slave,
        env=os.environ | {MARK: mark, "HARDPOINT_BACKEND": "cpu", "TERM": "xterm", "COLUMNS": "200"},
        start_new_session=True,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(b"hello\n" * 3)
        process.stdin.close()
        while process.poll() is None:
            used = cpu_seconds(process.pid)
            if used >= cpu or time.monotonic() - start >= seconds:
                os.killpg(process.pid, signal.SIGINT)
                break
            time.sleep(0.003)
        code = process.wait(240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        seconds = time.monotonic() - start
        process.wait()
        is_sane = termios.tcgetattr(slave) == attributes
        os.close(slave)
        reader.join()
        os.close(master)
    for _ in range(1200):  # the kernel ends ranks and engines with their parent, not before it
        if not left(mark):
            break
        time.sleep(0.05)
    assert not left(mark)
    assert is_sane
    text = written.decode()
    assert text.rfind("\x1b[?25l") <= text.rfind("\x1b[?25h"), "the cursor is shown"
    return Ended(code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text), used, seconds)


@pytest.mark.timeout(900)
def test_ctrl_c_at_any_moment_is_one_line_and_130(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf")
    rng = random.Random(0)
    whole = run("generate", model)
    assert whole.code == 0, whole.err
    came = 0
    for number, name in enumerate([*COMMANDS] * 6):
        # On a loaded machine some end before the interrupt comes.
        if number >= 2 * len(COMMANDS) and came >= 7:
            break
        # Most of them early: that costs less, and a command's imports are where an exception goes astray.
        fraction = 0.02 + 0.96 * rng.random() ** 2
        # The suite waits for its processes most of the time.
        ended = run(name, model, **{"seconds" if name == "conformance" else "cpu": fraction * whole.cpu})
        told = f"{name} at {fraction:.3f}: {ended}"
        assert ended.code in (0, TOO_EARLY, ExitCode.INTERRUPTED), told
        lines = [line for part in re.split("[\r\n]", ended.err) if (line := part.strip()) and not ORDINARY.match(line)]
        assert lines == (["interrupted"] if ended.code == ExitCode.INTERRUPTED else []), told
        came += ended.code == ExitCode.INTERRUPTED
    assert came >= 7
