"""Three quarters of the interpreter's processor time, saved: what it does again at every call of a function and for every tensor,
and checks whose result it drops."""

from __future__ import annotations

import inspect
from functools import cache
from types import SimpleNamespace
from typing import Any


@cache
def quicken_interpreter() -> None:
    """Have Triton's interpreter patch its language once in a launch, and look once for what to patch; call built-in functions without their
    wrappers, remember numbers, what follows from a shape or from operands' types, and which numpy types stand for its own, leave it to
    numpy to broadcast operands, and compute an overflow's condition only for an assertion that is switched on (`debug`).

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

    check_operands, checked = semantic.binary_op_type_checking_impl, {}

    def operands_checked(self: Any, left: Any, right: Any, *which: Any, **asked: Any) -> Any:
        # What becomes of tensors follows from their types; what of a number, from its value, too. Triton has one zero, without a sign.
        key = (
            left.type.name if type(left) is tl.tensor else (type(left), left),
            right.type.name if type(right) is tl.tensor else (type(right), right),
            which,
            *asked.items(),
        )
        if key not in checked:
            found = check_operands(self, left, right, *which, **asked)
            checked[key] = [
                new if type(old) is not tl.tensor else None if old.type.name == new.type.name else new.type
                for old, new in zip((left, right), found, strict=True)
            ]
        to_left, to_right = checked[key]
        return (
            left if to_left is None else as_checked(self, left, to_left),
            right if to_right is None else as_checked(self, right, to_right),
        )

    def as_checked(self: Any, operand: Any, found: Any) -> Any:
        if type(found) is tl.tensor:  # that of a number
            return found
        if operand.dtype.name != found.scalar.name:
            operand = self.cast(operand, found.scalar)
        # Of another shape by its type alone: numpy broadcasts operands by itself.
        return tl.tensor(operand.handle, found)

    unwrap = tl.core._unwrap_if_constexpr

    def unwrapped(value: Any) -> Any:
        return value if type(value) is tl.tensor else unwrap(value)

    make_constant, constants = semantic.scalar_constant, {}

    def known_constant(self: Any, value: Any, dtype: Any) -> Any:
        # One for all: no operator writes to its operands.
        key = (type(value), value, dtype.name)
        if key not in constants:
            constants[key] = make_constant(self, value, dtype)
        return constants[key]

    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    load_masked = builder.create_masked_load

    @cache
    def all_alike(shape: Any, number: int, kind: Any) -> Any:
        return handle_of(np.full(shape, number, interpreter._get_np_dtype(kind)), kind)

    def load(self: Any, pointers: Any, *how: Any) -> Any:
        return self.create_masked_load(pointers, all_alike(pointers.data.shape, 1, tl.int1), None, *how)

    def load_masked_or_zero(self: Any, pointers: Any, mask: Any, other: Any, *how: Any, **named: Any) -> Any:
        if other is None:
            other = all_alike(pointers.data.shape, 0, pointers.get_element_ty())
        return load_masked(self, pointers, mask, other, *how, **named)

    def expand_dims(self: Any, operand: Any, axis: int) -> Any:
        return handle_of(operand.data[(slice(None),) * axis + (None,)], operand.dtype.scalar)

    make_block, blocks = tl.block_type.__init__, {}
    make_tensor, shapes = tl.tensor.__init__, {}

    def block_of_known_shape(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(shape.values if type(shape) is tl.tuple else shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = (self.shape, self.numel, self.name)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def tensor_of_known_shape(self: Any, handle: Any, type: Any) -> None:
        key = type.name if isinstance(type, tl.block_type) else ""
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
    semantic.scalar_constant = known_constant
    tl.core._unwrap_if_constexpr = unwrapped
    builder.create_load, builder.create_masked_load = load, load_masked_or_zero
    builder.create_expand_dims = expand_dims
    tl.block_type.__init__ = block_of_known_shape
    tl.tensor.__init__ = tensor_of_known_shape
    interpreter._get_np_dtype = np_dtype
    interpreter._convert_float = converted
    semantic.binary_op_sanitize_overflow_impl = overflow_checked
