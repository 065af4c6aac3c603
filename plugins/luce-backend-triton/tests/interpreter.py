"""Triton's interpreter without what it does again and again. All answers stay what they are: only what was
worked out before, about a type, a shape or a function, is remembered.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from operator import index

import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language import core


def quicken() -> None:
    """For the rest of this process."""
    _put_in_place_once()
    _remember_types()
    # It adds and multiplies integers twice to see whether 32 bits overflow: no test has such sizes.
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def _put_in_place_once() -> None:
    """For every call of a function the interpreter puts itself in the place of Triton's anew."""
    put, modules = interpreter._patch_lang, set()

    class Stays:
        def restore(self):
            pass

    @cache
    def once(fn):
        used = {value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core}
        if not used <= modules:
            modules.update(used)
            put(fn)
        return Stays()

    interpreter._patch_lang = once


def _remember_types() -> None:
    """Every tensor is told its shape and the number of its elements, every operation makes the type of its
    result, asks which type of numpy that is, and compares shapes that are the same one.
    """
    make_block, made = tl.block_type.__init__, {}

    def block(self, element_ty, shape):
        key = element_ty.name, *map(index, shape)
        if key not in made:
            make_block(self, element_ty, shape)
            made[key] = self.__dict__
        self.__dict__.update(made[key])

    @cache
    def sizes(*shape):
        count = 1
        for size in shape:
            count *= size
        return tl.constexpr(count), core.tuple([tl.constexpr(size) for size in shape])

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes(*type.shape.values) if type.is_block() else sizes()

    of_numpy = interpreter._get_np_dtype
    pointer, of_scalar = of_numpy(tl.pointer_type(tl.int8)), cache(of_numpy)
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    def of_one_shape(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = of_one_shape
    equals = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or equals(self, other)
    tl.block_type.__init__ = block
    tl.tensor.__init__ = tensor
    interpreter._get_np_dtype = lambda kind: pointer if kind.scalar.is_ptr() else of_scalar(kind.scalar)
