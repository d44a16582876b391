"""The examples can be read by what they are for."""

import configparser
import plistlib
from pathlib import Path

from server.key_file import read_key_file

SERVICE = Path(__file__).parent.parent / "examples" / "service"


def test_the_plist_and_the_unit_start_a_server():
    plist = plistlib.loads((SERVICE / "ai.callboard.server.plist").read_bytes())
    assert plist["ProgramArguments"][1] == "serve"
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keys keep their case
    unit.read(SERVICE / "callboard.service")
    assert " serve " in unit["Service"]["ExecStart"]
    assert int(unit["Service"]["TimeoutStopSec"]) > 30 + 20


def test_the_keys_are_keys():
    alice, operator = read_key_file(SERVICE / "keys.toml")
    assert [quota.kind for quota in alice.quotas] == ["requests", "tokens"]
    assert operator.admin
