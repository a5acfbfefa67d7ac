"""A run as a picture: how many of its times were at most so long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from hardpoint.bench.answers import Answer
from hardpoint.bench.statistics import Objective

SUFFIXES = (".svg", ".png", ".pdf")


def save(path: Path, answers: Sequence[Answer], objectives: Sequence[Objective], title: str) -> None:
    """Write the cumulative distributions of first token, inter-token latency and end to end, in ms, with the objectives as lines.

    Raises OSError.
    """
    done = [answer for answer in answers if answer.error is None]
    panels = {
        "ttft": ("time to first token", [ttft for answer in done if (ttft := answer.ttft) is not None]),
        "itl": ("inter-token latency", [gap for answer in done for gap in answer.itl]),
        "e2e": ("end to end", [answer.e2e for answer in done]),
    }
    limits = {objective.name: objective.seconds for objective in objectives}
    # Text stays text, so that a picture is small and can be searched.
    with rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        figure.suptitle(title, parse_math=False)
        for axes, (name, (label, seconds)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            if seconds:
                axes.ecdf(np.array(seconds) * 1e3)
            if name in limits:
                axes.axvline(limits[name] * 1e3, color="tab:red", linestyle="--")
            axes.set(xlabel=f"{label} (ms)", ylabel="share", ylim=(0, 1))
            axes.grid(alpha=0.3)
        figure.savefig(path)
