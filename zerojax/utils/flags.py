"""Lists that are selected from and merged by flags."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def select(values: Iterable[T], flags: Iterable[bool]) -> list[T]:
    """The values whose flag is true."""
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def merge(flags: Iterable[bool], true: Iterable[T], false: Iterable[T]) -> list[T]:
    """The inverse of `select` by `flags` (for `true`) and by its negation (for `false`)."""
    true_items, false_items = iter(true), iter(false)
    return [next(true_items) if flag else next(false_items) for flag in flags]


def replaced(values: Sequence[T], flags: Sequence[bool], fn: Callable[[list[T]], Sequence[T]]) -> list[T]:
    """The values, with the flagged ones replaced by `fn` of them."""
    return merge(flags, fn(select(values, flags)), select(values, negate(flags)))


def negate(flags: Iterable[bool]) -> list[bool]:
    return [not flag for flag in flags]
