"""Settings: flags over environment over file over defaults, and errors that name what is wrong and where."""

import argparse

import pytest

from server.settings import OPTIONS, ServeSettings, SettingsError, add_options, resolve_settings


def resolve(flags=(), environment=(), file=None, tmp_path=None):
    parser = argparse.ArgumentParser()
    add_options(parser)
    if file is not None:
        path = tmp_path / "callboard.toml"
        path.write_text(file)
        flags = [*flags, "--config", str(path)]
    return resolve_settings(parser.parse_args(list(flags)), dict(environment))


def test_defaults():
    settings = resolve()
    assert settings == ServeSettings()
    assert (settings.host, settings.port, settings.stream_interval) == ("127.0.0.1", 8000, 1)
    assert (settings.http_workers, settings.timeout, settings.drain_timeout) == (1, 600, 30)


def test_every_setting_has_an_option_and_the_other_way_round():
    assert set(OPTIONS) == set(ServeSettings.__struct_fields__)


def test_flags_win_over_environment_over_file(tmp_path):
    file = "port = 1\ntimeout = 5\nmax-num-seqs = 7\nallow_origins = ['http://a', 'http://b']\n"
    environment = {"CALLBOARD_PORT": "2", "CALLBOARD_TIMEOUT": "6", "CALLBOARD_HOME": "/x"}
    settings = resolve(["--port", "3"], environment.items(), file, tmp_path)
    assert (settings.port, settings.timeout, settings.max_num_seqs) == (3, 6.0, 7)
    assert settings.allow_origins == ["http://a", "http://b"]


def test_keys_may_be_given_several_times_or_in_the_environment():
    assert resolve(["--api-key", "a", "--api-key", "b,c"]).api_key == ["a", "b", "c"]
    assert resolve([], {"CALLBOARD_API_KEY": "a,b"}.items()).api_key == ["a", "b"]
    assert resolve(["--zmq-tcp", "[::1]:5555"]).zmq_tcp == "[::1]:5555"
    open_to_all = resolve(["--zmq-tcp", "0.0.0.0:5555", "--zmq-keys", "server.key", "--api-key", "a"])
    assert open_to_all.zmq_keys == "server.key"


def test_booleans(tmp_path):
    assert resolve(["--trust-remote-code"]).trust_remote_code
    assert not resolve(["--no-trust-remote-code"], {"CALLBOARD_TRUST_REMOTE_CODE": "1"}.items()).trust_remote_code
    assert resolve(file="trust-remote-code = true", tmp_path=tmp_path).trust_remote_code


@pytest.mark.parametrize(
    ("flags", "environment", "file", "text"),
    [
        (["--port", "x"], {}, None, "--port: 'x' is no whole number"),
        (["--port", "70000"], {}, None, "--port: 70000 is not in 0 … 65535"),
        ([], {"CALLBOARD_STREAM_INTERVAL": "0"}, None, "CALLBOARD_STREAM_INTERVAL: 0 is not in"),
        ([], {"CALLBOARD_LOG_LEVEL": "loud"}, None, "CALLBOARD_LOG_LEVEL"),
        (["--zmq-tcp", "0.0.0.0:5555"], {}, None, "needs --zmq-keys"),
        (["--zmq-tcp", "example.org:5555"], {}, None, "no address and port"),
        (["--zmq-keys", "server.key"], {}, None, "--zmq-tcp, which is not given"),
        (["--zmq-tcp", "127.0.0.1:70000"], {}, None, "70000 is not in"),
        (["--zmq-tcp", "127.0.0.1:5555", "--api-key", "x"], {}, None, "needs --zmq-keys"),
        ([], {}, "prot = 1", "no setting is called 'prot'"),
        ([], {}, "port = 'abc'", "port: 'abc' is no whole number"),
        ([], {}, "port = ", "is not TOML"),
        ([], {}, "[port]\na = 1", "port must be a single value"),
    ],
)
def test_errors_name_the_setting_and_its_source(flags, environment, file, text, tmp_path):
    with pytest.raises(SettingsError) as caught:
        resolve(flags, environment.items(), file, tmp_path)
    assert text in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(SettingsError, match="can't be read"):
        resolve(["--config", "/nonexistent/x.toml"])
