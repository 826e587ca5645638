"""Configuration: frozen dataclasses in, fingerprints and command-line overrides out.

Each component owns its config dataclass, beside its code. This module only knows how to turn one into a
dict, a dict into one, ``--section.field value`` into a changed copy, and any of it into a fingerprint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from depthgrow.files import UserError, unknown

C = TypeVar("C")


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass as plain JSON types (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def from_dict(cls: type[C], values: dict[str, Any]) -> C:
    """Build a config from plain types, checking every field's name and type.

    Raises:
        UserError: one line naming the field, the value received and what was expected.
    """
    _check_names(cls, values)
    _refuse_truth_values(cls, values)
    try:
        config = _adapter(cast(Any, cls)).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != cls.__name__)
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "value_error":
            raise UserError(message) from None
        raise UserError(f"--{where} {first['input']!r}: {message[0].lower()}{message[1:]}") from None
    require_finite(config)
    return config


def require_finite(config: Any) -> None:
    """Refuse infinities and NaN: no field wants one, and the JSON files that record a run cannot hold them.

    Raises:
        UserError: naming the field.
    """
    for name, value in fields_of(config):
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, float) and not math.isfinite(part):
                hint = "; none turns clipping off" if name.endswith("clip_norm") else ""
                raise UserError(f"{name}={part} is not a finite number{hint}")


def _refuse_truth_values(cls: Any, values: dict[str, Any], prefix: str = "") -> None:
    """Python counts True as 1: a number written true is a mistake."""
    hints = get_type_hints(cls)
    for name, value in values.items():
        if isinstance(value, dict) and dataclasses.is_dataclass(hints[name]):
            _refuse_truth_values(hints[name], value, f"{prefix}{name}.")
        elif isinstance(value, bool) and bool not in (hints[name], *get_args(hints[name])):
            raise UserError(f"--{prefix}{name} {str(value).lower()}: this field takes no truth value")


def _check_names(cls: Any, values: dict[str, Any], prefix: str = "") -> None:
    known = {field.name: field for field in dataclasses.fields(cls)}
    hints = get_type_hints(cls)
    for name, value in values.items():
        if name not in known:
            raise unknown("field", prefix + name, [prefix + other for other in known])
        if isinstance(value, dict) and dataclasses.is_dataclass(hints[name]):
            _check_names(hints[name], value, f"{prefix}{name}.")


def fields_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf as ('section.field', value): what ``--section.field`` can set."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def override(config: C, assignments: dict[str, Any]) -> C:
    """A copy of ``config`` with dotted fields replaced, e.g. ``{"optim.peak_lr": "1e-3"}``.

    Text values are read by the field's type: numbers, true/false, ``none``, comma-separated lists.
    """
    known = dict(fields_of(config))
    values = to_dict(config)
    for name, value in assignments.items():
        if name not in known:
            raise unknown("field", name, known)
        *path, leaf = name.split(".")
        section = values
        for part in path:
            section = section[part]
        if isinstance(value, str):
            if value.lower() == "none":
                value = None
            elif isinstance(known[name], tuple):
                value = [part.strip() for part in value.split(",") if part.strip()]
        section[leaf] = value
    return from_dict(type(config), values)


def parse_assignments(arguments: Sequence[str]) -> dict[str, str]:
    """``["--optim.peak_lr", "1e-3", "--seeds=5"]`` as ``{"optim.peak_lr": "1e-3", "seeds": "5"}``."""
    assignments: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise UserError(f"unexpected argument {flag!r}; options are written --section.field value")
        name, equals, value = flag[2:].partition("=")
        if not equals:
            if not rest:
                raise UserError(f"{flag} needs a value")
            value = rest.pop(0)
        assignments[name] = value
    return assignments


def fingerprint(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of the canonical JSON of ``value``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = to_dict(value)
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
