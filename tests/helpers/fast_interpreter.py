"""Triton's interpreter without what it does over and over, which is three quarters of its work in our tests."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import FunctionType

from triton.language import core
from triton.runtime import interpreter

Shape = tuple[int, ...]


def speed_up() -> None:
    """Make kernels run faster in the interpreter; what they compute, and its errors, stay as they are."""
    patch_language_once()
    remember_types()
    options = interpreter.interpreter_builder.options
    assert not options.debug  # without it, no computed check for overflows is looked at: it may as well not be computed
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def patch_language_once() -> None:
    """Let the interpreter replace the functions of `triton.language` once for each module with kernels, and for good.

    By itself it does so at every launch and at every call of a function in a kernel.
    """
    patch = interpreter._patch_lang
    patched: set[str] = set()

    def patch_first(function: FunctionType) -> interpreter._LangPatchScope:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = patch_first


def remember_types() -> None:
    """Let the interpreter work out each shape and dtype once, and not again for the result of every operation."""
    core.pointer_type.__hash__ = core.dtype.__hash__  # which its `__eq__` took away
    make_block = core.block_type.__init__
    blocks: dict[tuple[core.dtype, Shape], core.block_type] = {}
    dtype_in_numpy = functools.cache(interpreter._get_np_dtype)

    @functools.cache
    def shape_and_size(shape: Shape) -> tuple[core.tuple, core.constexpr]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def block(self: core.block_type, element_ty: core.dtype, shape: Sequence[int | core.constexpr]) -> None:
        key = element_ty, tuple(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self
        self.__dict__.update(blocks[key].__dict__)

    def tensor(self: core.tensor, handle: object, type: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_and_size(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = lambda dtype: dtype_in_numpy(dtype.scalar)
