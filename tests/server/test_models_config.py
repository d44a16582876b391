"""Which models are served: the command line's and the file's, with settings of their own."""

from pathlib import Path
from typing import Any

import pytest

from server.cli_serve import cast_config
from server.models_config import ModelEntry, is_alone, read_models
from server.settings import ServeSettings, SettingsError

FILE = """
[models.small]
model = "org/small"
aliases = ["gpt-4o-mini"]
pin = true
memory = 2
max_num_seqs = 8
idle-ttl = 60

[models."org/other"]
memory = "500MB"
"""


def read(tmp_path: Path, text: str, *models: str, **settings: object):
    (tmp_path / "models.toml").write_text(text)
    return read_models([*models], ServeSettings(models_config=str(tmp_path / "models.toml"), **settings))


def test_the_file_and_the_command_line_together(tmp_path: Path):
    first, small, other = read(tmp_path, FILE, "x=demo", max_num_seqs=32)
    assert (first.name, first.spec, first.settings.max_num_seqs) == ("x", "demo", 32)
    assert (small.name, small.spec, small.aliases, small.pin) == ("small", "org/small", ["gpt-4o-mini"], True)
    assert (small.memory, small.settings.max_num_seqs, small.settings.idle_ttl) == (2 << 30, 8, 60.0)
    assert (other.name, other.spec, other.memory, other.pin) == ("org/other", "org/other", 500 << 20, False)
    assert other.settings.max_num_seqs == 32


def test_one_model_needs_no_house_and_none_is_refused():
    assert is_alone(["demo"], ServeSettings())
    assert not is_alone(["demo", "other"], ServeSettings())
    assert not is_alone(["demo"], ServeSettings(models_config="models.toml"))
    with pytest.raises(SettingsError, match="name a model"):
        is_alone([], ServeSettings())


def test_the_memory_for_all_models_is_that_of_the_only_one():
    for settings in (ServeSettings(models_memory=5), ServeSettings(memory_limit=5, models_memory=7)):
        assert cast_config(settings, "x", Path(), {}, Path()).memory_limit == 5


@pytest.mark.parametrize("settings", [{"idle_ttl": 60.0}, {"preload": []}])
def test_a_single_model_that_comes_and_goes_needs_one(settings: dict[str, Any]):
    own = ServeSettings(**settings, served_model_name="x", memory_limit=5, adapter_path=["a=/b"], zmq_tcp="[::1]:5")
    assert not is_alone(["demo"], own)
    assert read_models(["demo"], own) == [ModelEntry("x", "demo", own, memory=5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.a]\nmodle = 'x'", r"\[models\.a\]: no setting is called 'modle'; there are model, aliases"),
        ("[models.a]\nhost = '::1'", "no setting is called 'host'"),
        ("[models.a]\nkv_bits = 5", r"kv_bits: '5' is none of 4, 8"),
        ("[models.a]\npin = 1", "pin must be true or false"),
        ("[models.a]\naliases = 'x'", "aliases must be a list"),
        ("[models.a]\nmemory = 'much'", "memory: 'much' is no size"),
        ("[models.a]\nzmq_tcp = '0.0.0.0:5555'", "needs --zmq-keys"),
        ("[model.a]\n", r"tables \[models.NAME\], and nothing else; it has model"),
        ("nothing", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str):
    with pytest.raises(SettingsError, match=message):
        read(tmp_path, text)


def test_settings_that_several_models_can_not_share_are_refused():
    with pytest.raises(SettingsError, match="--memory-limit is for a single model; use --models-memory"):
        read_models(["a", "b"], ServeSettings(memory_limit=1 << 30))
    with pytest.raises(SettingsError, match="neither MODEL nor NAME=MODEL"):
        read_models(["=a", "b"], ServeSettings())
