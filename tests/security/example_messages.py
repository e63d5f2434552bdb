"""Valid messages of every type that a decoder reads, for attacks that begin with them and change something."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec.inspect as types

MAX_DEPTH = 4
MAX_EXAMPLES = 64


def examples(kind: Any) -> list[Any]:
    """Values of a type that `msgspec` encodes as one: of each type of a union, with and without what is optional."""
    return list(itertools.islice(_values(types.type_info(kind), 0), MAX_EXAMPLES))


def _values(kind: types.Type, depth: int) -> Iterator[Any]:
    match kind:
        case types.UnionType():
            for each in kind.types:
                yield from _values(each, depth)
        case types.StructType() | types.DataclassType() | types.NamedTupleType():
            yield from _objects(kind, depth)
        case types.ListType() | types.VarTupleType() | types.SetType() | types.CollectionType():
            yield []
            if depth < MAX_DEPTH:
                yield from ([each, each] for each in itertools.islice(_values(kind.item_type, depth + 1), 8))
        case types.TupleType():
            yield [next(_values(each, depth + 1)) for each in kind.item_types]
        case types.DictType():
            yield {}
            if depth < MAX_DEPTH:
                yield {key: next(_values(kind.value_type, depth + 1)) for key in _values(kind.key_type, depth + 1)}
        case types.EnumType():
            yield from (each.value for each in kind.cls)
        case types.LiteralType():
            yield from kind.values
        case _:
            yield _PLAIN[type(kind)]


_PLAIN: dict[type, Any] = {
    types.IntType: 1,
    types.FloatType: 0.5,
    types.StrType: "worker/1",
    types.BytesType: b"12345678",
    types.BoolType: True,
    types.NoneType: None,
    types.AnyType: {"a": [1]},
    types.RawType: {},
}


Fields = types.StructType | types.DataclassType | types.NamedTupleType


def _objects(kind: Fields, depth: int) -> Iterator[Any]:
    is_list = isinstance(kind, types.NamedTupleType) or (isinstance(kind, types.StructType) and kind.array_like)
    for each in _fields(kind, depth):
        yield list(each.values()) if is_list else each


def _fields(kind: Fields, depth: int) -> Iterator[dict[str, Any]]:
    tag = {kind.tag_field: kind.tag} if isinstance(kind, types.StructType) and kind.tag_field else {}
    fields = [field for field in kind.fields if field.required or depth < MAX_DEPTH]
    full = {field.encode_name: list(itertools.islice(_values(field.type, depth + 1), 8)) for field in fields}
    yield {**tag, **{field.encode_name: full[field.encode_name][0] for field in fields if field.required}}
    for turn in range(max(map(len, full.values()), default=0)):
        yield {**tag, **{name: values[turn % len(values)] for name, values in full.items()}}
