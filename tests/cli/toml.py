"""A policy's values as TOML: as much of the format as policies use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction


def dumps(tree: Mapping[str, object]) -> str:
    return "\n".join(f"{json.dumps(key)} = {_value(value)}" for key, value in tree.items()) + "\n"


def _value(value: object) -> str:
    match value:
        case bool() | int():
            return json.dumps(value)
        case Decimal():
            text = f"{value:f}"
            return text if "." in text else f"{text}.0"
        case Fraction():
            return json.dumps(str(value))
        case Mapping():
            inner = ", ".join(f"{json.dumps(key)} = {_value(each)}" for key, each in value.items())
            return f"{{ {inner} }}"
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
    return json.dumps(str(value))
