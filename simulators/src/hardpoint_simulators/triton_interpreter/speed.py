"""Half of the interpreter's processor time, saved: what it looks up again at every call of a function, and checks whose result it drops."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


@cache
def quicken_interpreter() -> None:
    """Have Triton's interpreter remember which names of its modules are functions of the language and which numpy types stand for its own,
    and compute an overflow's condition only for an assertion that is switched on (`debug`).

    Results are the same. To be called outside of launches; a release of Triton without these functions is left as it is.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    semantic = type(interpreter.interpreter_semantic)
    if not all(hasattr(interpreter, name) for name in ("_patch_builtin", "_patch_attr", "_get_np_dtype")):
        return
    if not hasattr(semantic, "binary_op_sanitize_overflow_impl"):
        return

    packages = (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base)
    functions = {package: [n for n, f in inspect.getmembers(package) if tl.core.is_builtin(f)] for package in packages}
    patch_all = interpreter._patch_builtin

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in functions:
            patch_all(package, builder, scope)
            return
        for name in functions[package]:
            member = getattr(package, name)
            # In a launch it is replaced once; functions that a kernel calls find it so.
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    dtype_of = interpreter._get_np_dtype
    kinds = [kind for kind in vars(tl).values() if type(kind) is tl.dtype and kind is not tl.void]
    known = {kind.name: dtype_of(kind) for kind in kinds}

    def np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else known[scalar.name]

    check_overflow = semantic.binary_op_sanitize_overflow_impl

    def overflow_checked(self: Any, *operation: Any) -> None:
        # Else what it computes is given to an assertion that is switched off.
        if self.builder.options.debug:
            check_overflow(self, *operation)

    interpreter._patch_builtin = patch
    interpreter._get_np_dtype = np_dtype
    semantic.binary_op_sanitize_overflow_impl = overflow_checked
