"""Types of the fields that users set. A wrong one is named at once, not where it first hurts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import get_args, get_origin, get_type_hints

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}


def check(name: str, value: object, *kinds: type) -> None:
    """Raise a ValueError unless ``value`` is one of ``kinds`` (an int is a number; a bool, infinity and nan are neither)."""
    for kind in kinds:
        if (isinstance(value, bool) and kind is not bool) or (isinstance(value, float) and not math.isfinite(value)):
            continue
        if isinstance(value, kind) or (kind is float and isinstance(value, int)):
            return
    raise ValueError(f"{name}={value!r} must be {' or '.join(WORDS[k] for k in kinds)}")


def check_fields(instance: object) -> None:
    """Check every field of a dataclass whose annotation is plain: int, float, str, bool, or one of them or None."""
    hints = get_type_hints(type(instance))
    for field in fields(instance):
        hint = hints[field.name]
        kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        if all(k in WORDS for k in kinds):
            check(field.name, getattr(instance, field.name), *kinds)


def check_mapping(values: Mapping, kinds: Mapping[str, tuple[type, ...]]) -> None:
    """Check dotted names of a nested mapping."""
    for name, allowed in kinds.items():
        value = values
        for part in name.split("."):
            value = value[part]
        check(name, value, *allowed)
