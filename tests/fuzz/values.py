"""Hostile values, and changes of JSON."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

INTEGERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    127,
    255,
    256,
    4096,
    2**16,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**31),
]
FLOATS = [0.0, -0.0, 0.5, -0.5, 1e-45, 1e-320, 1e39, 1e308, math.nan, math.inf, -math.inf]
TEXTS = [
    "",
    "x",
    "512",
    "\0",
    "\ud800",
    "é" * 300,
    "a" * 5000,
    "../..",
    "/",
    "/dev/zero",
    "float32",
    "default",
    "<s>",
    "{{",
    "[\n",
]
SCALARS: list[Any] = [None, True, False, *INTEGERS, 10**400, *FLOATS, *TEXTS]
NESTED: list[Any] = [
    [],
    {},
    [None],
    [[]],
    [2**70],
    ["x", 5],
    {"x": 1},
    {"": None},
    {"rope_type": "yarn"},
    {"factor": 0},
    [0] * 3000,
]


def hostile(rng: Random) -> Any:
    """Return a value that JSON can hold."""
    kind = rng.random()
    if kind < 0.75:
        return rng.choice(SCALARS)
    if kind < 0.97:
        return copy.deepcopy(rng.choice(NESTED))
    deep: Any = 1
    for _ in range(rng.choice([5, 50, 400])):
        deep = [deep] if rng.random() < 0.5 else {"x": deep}
    return deep


def changed(rng: Random, value: Any) -> Any:
    """Return JSON with one place of it changed."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        value = copy.copy(value)
        place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        action = rng.random()
        if action < 0.75:
            value[place] = changed(rng, value[place])
        elif action < 0.85:
            del value[place]
        elif isinstance(value, list):
            value.insert(place, copy.deepcopy(value[place]))
        elif action < 0.95:
            value[str(rng.choice([*TEXTS, *value]))] = value[place]
        else:
            value[place + rng.choice(["s", " ", "\0"])] = value.pop(place)
        return value
    if type(value) is int and rng.random() < 0.4:
        return value + rng.choice([-1, 1, 2, value, -2 * value])
    if type(value) is float and rng.random() < 0.4:
        return value * rng.choice([-1, 0.5, 1e-6, 1e6, 3])
    return hostile(rng)


def damaged(rng: Random, data: bytes) -> bytes:
    """Return bytes of which some are others, lost, doubled, or added."""
    action = rng.random()
    place = rng.randrange(len(data) + 1)
    if action < 0.4 and data:
        some = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            some[rng.randrange(len(some))] = rng.choice([0, 255, 128, rng.randrange(256)])
        return bytes(some)
    if action < 0.6:
        return data[:place]
    if action < 0.75:
        return data[:place] + data[place + rng.choice([1, 4, 100]) :]
    if action < 0.9:
        return data[:place] + data[max(0, place - rng.choice([1, 8, 64])) :]
    return data[:place] + rng.randbytes(rng.choice([1, 8, 100])) + data[place:]


def write_json(rng: Random, file: Path, content: Any) -> None:
    """Write JSON, and now and then what is none."""
    data = json.dumps(content).encode()
    file.write_bytes(damaged(rng, data) if rng.random() < 0.1 else data)


def misplaced(rng: Random, files: Sequence[Path]) -> None:
    """Put something else where a file is expected: nothing, a link to itself or to nowhere, a folder, a pipe, a device."""
    import os

    file = rng.choice(files)
    file.unlink(missing_ok=True)
    kind = rng.randrange(7)
    if kind == 1:
        file.symlink_to(file)
    elif kind == 2:
        file.symlink_to("nowhere")
    elif kind == 3:
        file.mkdir()
    elif kind == 4:
        os.mkfifo(file)
    elif kind == 5:
        file.symlink_to("/dev/zero")
    elif kind == 6:
        file.write_bytes(b"")
