"""Declared types: dataclasses whose fields are checked against their annotations, with one typed error for what does not fit.

Settings, sampling parameters and prompts derive from `Validated`; what a field accepts is written in its annotation, and nowhere else.
"""

from hardpoint.validation.declared import (
    FLOAT32_MAX,
    INT32_MAX,
    FileName,
    GiB,
    Int64,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Share,
    Validated,
    did_you_mean,
    shown,
)

__all__ = [
    "FLOAT32_MAX",
    "INT32_MAX",
    "FileName",
    "GiB",
    "Int64",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Seconds",
    "Share",
    "Validated",
    "did_you_mean",
    "shown",
]
