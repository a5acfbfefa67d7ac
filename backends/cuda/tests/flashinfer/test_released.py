"""The released FlashInfer takes the calls, and the reference takes none that it would not; read from its source, nothing of it runs."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from zipfile import ZipFile

import pytest

from hardpoint_cuda.flashinfer.signatures import CALLS, Call, differences

from .conftest import REFERENCE


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what is called of the released package."""
    folder = tmp_path_factory.mktemp("released")
    (wheel,) = Path(os.environ["HARDPOINT_FLASHINFER_WHEEL"]).glob("flashinfer_python-*.whl")
    with ZipFile(wheel) as archive:
        for file in {call.file for call in CALLS}:
            archive.extract(f"flashinfer/{file}", folder)
    return folder / "flashinfer"


def test_released_package_takes_the_calls(released: Path) -> None:
    assert differences(released) == []


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.owner}.{call.method}")
def test_reference_has_no_arguments_that_the_released_package_has_not(call: Call, released: Path) -> None:
    module = ast.parse((REFERENCE / "flashinfer" / call.file).read_text("utf-8"))
    (owner,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == call.owner)
    (method,) = (node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == call.method)
    arguments = tuple(argument.arg for argument in (*method.args.args[1:], *method.args.kwonlyargs))
    assert set(call.arguments) <= set(arguments)
    found = Call(call.file, call.owner, call.method, arguments).differences(released)
    assert found == []
