"""docs/protocol.md against the code: its tables list every field, and its frames are what the codec makes and reads."""

import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol import errors
from protocol import messages as m
from protocol.codec import client_codec, encode, server_codec

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
FRAMES = re.findall(r"```frame\n(.*?)```", TEXT, re.DOTALL)
Row = tuple[str, str, str, str]


def structs_of(kind: Any) -> set[type[msgspec.Struct]]:
    """The Structs in a type, and those in their fields."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        found = {kind}
        for hint in typing.get_type_hints(kind).values():
            found |= structs_of(hint)
        return found
    return set().union(*(structs_of(part) for part in typing.get_args(kind)))


def wire_type(kind: Any) -> str:
    """How the document calls a type."""
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case types.UnionType:
            return " or ".join(map(wire_type, arguments))
        case kind_of if kind_of is list:
            return f"array of {wire_type(arguments[0])}"
        case kind_of if kind_of is dict and arguments[1] is Any:
            return "map"
        case kind_of if kind_of is dict:
            return f"map of {wire_type(arguments[0])} to {wire_type(arguments[1])}"
    if issubclass(kind, msgspec.Struct):
        return kind.__name__
    return {int: "int", float: "float", str: "str", bytes: "bin", bool: "bool", type(None): "nil"}[kind]


def default(field: msgspec.structs.FieldInfo) -> str:
    """How the document writes a field's default."""
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is msgspec.NODEFAULT:
        return ""
    if isinstance(value, msgspec.Struct):
        return "`its defaults`"
    if isinstance(value, bytes):
        return f"`h'{value.hex()}'`"
    return f"`{'nil' if value is None else msgspec.json.encode(value).decode()}`"


def rows_of(struct: type[msgspec.Struct]) -> list[Row]:
    """The table of a message or part, but for its last column."""
    hints = typing.get_type_hints(struct)
    first = 0 if struct.__struct_config__.tag is None else 1
    return [
        (str(first + i), f"`{field.name}`", wire_type(hints[field.name]), default(field))
        for i, field in enumerate(msgspec.structs.fields(struct))
    ]


def documented() -> dict[str, list[Row]]:
    """The tables under each heading of the document's third level."""
    tables = {}
    for heading, body in re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", TEXT, re.DOTALL | re.MULTILINE):
        lines = [line for line in body.splitlines() if line.startswith("|")][2:]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        tables[heading] = [(row[0], row[1], row[2], row[3]) for row in cells]
    return tables


def test_the_tables_are_those_of_the_messages():
    spoken = structs_of(m.ClientMessage | m.ServerMessage | m.ModelOrder | m.ModelAnswer)
    tags = {struct: struct.__struct_config__.tag for struct in spoken}
    expected = {struct.__name__ + ("" if tag is None else f" · {tag}"): rows_of(struct) for struct, tag in tags.items()}
    found = documented()
    for heading, rows in expected.items():
        assert found.pop(heading, None) == rows, f"write down in docs/protocol.md how {heading} is now"
    assert not found


def notation(text: str) -> Any:
    """A value as the document writes it."""
    text = re.sub(r"h'([0-9a-f]*)'", r'{"hex": "\1"}', text.replace("\n", " "))
    text = re.sub(r"\bnil\b", "null", text)

    def bins(value: Any) -> Any:
        if isinstance(value, list):
            return [bins(item) for item in value]
        if isinstance(value, dict):
            return bytes.fromhex(value["hex"]) if value.keys() == {"hex"} else {k: bins(v) for k, v in value.items()}
        return value

    return bins(msgspec.json.decode(text))


@pytest.mark.parametrize("example", FRAMES, ids=lambda example: example[:12])
def test_the_frames_are_those_of_the_codec(example):
    written = re.split(r"\n(?=[0-9a-f]+\n)", example, maxsplit=1)
    value, frame = notation(written[0]), bytes.fromhex(written[1].replace("\n", ""))
    assert msgspec.msgpack.encode(value) == frame
    codec = client_codec if value[0] < 20 else server_codec
    assert begins(msgspec.msgpack.decode(encode(codec.decode(frame))), value)


def begins(whole: Any, example: Any) -> bool:
    """Whether `example` is `whole`, but for the fields that it leaves out at the end of its arrays."""
    if isinstance(example, list):
        return len(example) <= len(whole) and all(map(begins, whole, example))
    return bool(whole == example)


def test_every_error_code_is_listed():
    codes = {value for name, value in vars(errors).items() if name.isupper()}
    # Codes of the Python client alone, or answered by `Refused`.
    assert codes - {"server_lost", "protocol_mismatch"} == set(re.findall(r"`([a-z_]+)`", errors_table()))


def errors_table() -> str:
    section = TEXT.partition("## Errors")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return "\n".join(line.split("|")[1] for line in lines)
