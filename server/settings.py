"""Settings of `callboard serve`: one table of options, read from flags, `CALLBOARD_*` and a TOML file.

Flags win over the environment, which wins over the file (`--config FILE`), which wins over the defaults. In the
file and the environment an option has the flag's name: `max-num-seqs = 64`, `CALLBOARD_MAX_NUM_SEQS=64`.
"""

import argparse
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec


class SettingsError(ValueError):
    """A setting can't be used. The text names it, where it came from, and what to write instead."""


def _number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], Any]:
    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is no {'whole ' if kind is int else ''}number") from None
        if not low <= value <= high:
            raise ValueError(f"{text} is not in {low:g} … {high:g}")
        return value

    return parse


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _one_of(*numbers: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if text not in map(str, numbers):
            raise ValueError(f"{text!r} is none of {', '.join(map(str, numbers))}")
        return int(text)

    return parse


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 12GB or 800MB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def parse_gigabytes(text: str) -> int:
    """Bytes of a size; a bare number is in GB. Raises ValueError."""
    return _size(text if text.strip()[-1:].isalpha() else f"{text}GB")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    try:
        host == "localhost" or ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        raise ValueError(f"{text!r} is no address and port, such as 127.0.0.1:5555") from None
    _number(int, 1, 65535)(port)
    return text


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches `HOST:PORT`."""
    host = address.rpartition(":")[0]
    return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class ServeSettings(msgspec.Struct, frozen=True):
    """Resolved settings. Times are in seconds; see `OPTIONS` for what each one means."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    served_model_name: str = ""
    task: str = "generate"
    http_workers: int = 1
    tokenizers: int = 1
    stream_interval: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_step_size: int = 2048
    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    decode_fairness: bool = True
    decode_stall_target_ms: float = 100.0
    memory_limit: int | None = None
    prefix_cache: bool = True
    cache_memory_mb: int | None = None
    cache_memory_percent: float = 0.2
    warm_prompts: str = ""
    ssd_cache: bool = True
    ssd_cache_dir: str = ""
    ssd_cache_max_gb: float | None = None
    ssd_write_mbps: float = 200.0
    flush_timeout: float = 20.0
    adapter_path: list[str] = []
    max_loras: int = 8
    kv_events: str = ""
    log_steps: bool = False
    models_config: str = ""
    models_memory: int | None = None
    idle_ttl: float = 0.0
    load_wait: float = 120.0
    preload: list[str] | None = None
    timeout: float = 600.0
    drain_timeout: float = 30.0
    start_timeout: float = 300.0
    hang_timeout: float | None = None
    zmq_tcp: str = ""
    zmq_keys: str = ""
    busy_poll: float = 0.0
    api_key: list[str] = []
    api_key_file: str = ""
    trusted_hosts: list[str] = []
    tls_cert: str = ""
    tls_key: str = ""
    log_prompts: bool = False
    otlp_endpoint: str = ""
    allow_origins: list[str] = []
    blas_threads: int | None = None
    trust_remote_code: bool = False
    log_level: str = "info"
    log_file: str = ""
    log_max_mb: float = 50.0
    log_keep: int = 5


@dataclass(frozen=True)
class Option:
    """How one setting is read and explained."""

    parse: Callable[[str], Any]
    metavar: str
    help: str


def _log_level(text: str) -> str:
    if text.lower() not in ("debug", "info", "warning", "error"):
        raise ValueError(f"{text!r} is not debug, info, warning or error")
    return text.lower()


def _task(text: str) -> str:
    tasks = {"generate": "generate", "embed": "embed", "rerank": "rank"}
    if text not in tasks:
        raise ValueError(f"{text!r} is not generate, embed or rerank")
    return tasks[text]


OPTIONS: dict[str, Option] = {
    "host": Option(str, "HOST", "address to listen on"),
    "port": Option(_number(int, 0, 65535), "PORT", "port to listen on; 0 takes a free one"),
    "name": Option(str, "NAME", "name by which clients find this server (default: the port)"),
    "served_model_name": Option(str, "NAME", "what clients call the model (default: the name it was given by)"),
    "task": Option(_task, "TASK", "generate text, or embed or rerank texts with a model made for it"),
    "http_workers": Option(_number(int, 1, 64), "N", "HTTP processes on one listening socket"),
    "tokenizers": Option(_number(int, 1, 64), "N", "tokenizer processes"),
    "stream_interval": Option(
        _number(int, 1, 10_000), "N", "gather up to N tokens of a stream per message; the first goes out at once"
    ),
    "max_num_seqs": Option(_number(int, 1, 65_536), "N", "streams that run at the same time"),
    "max_num_batched_tokens": Option(_number(int, 1, 10_000_000), "N", "tokens one step may process"),
    "prefill_step_size": Option(_number(int, 1, 1_000_000), "N", "prompt tokens of one stream per step"),
    "max_kv_size": Option(
        _number(int, 16, 1 << 30), "N", "keep only the last N tokens of a stream's context in memory"
    ),
    "kv_bits": Option(_one_of(4, 8), "4|8", "keep keys and values quantized to so many bits"),
    "kv_group_size": Option(_one_of(32, 64, 128), "32|64|128", "values that share a scale in quantized keys"),
    "decode_fairness": Option(_boolean, "BOOL", "bound how long prompts may hold up running streams (on)"),
    "decode_stall_target_ms": Option(
        _number(float, 1, 1e6), "MS", "how long a step may take because of others' prompts"
    ),
    "memory_limit": Option(_size, "SIZE", "memory of the engine process, such as 12GB (default: what the device has)"),
    "prefix_cache": Option(_boolean, "BOOL", "reuse the computed beginnings of prompts (on)"),
    "cache_memory_mb": Option(_number(int, 0, 1 << 30), "MB", "memory for prefixes"),
    "cache_memory_percent": Option(
        _number(float, 0, 1), "PART", "memory for prefixes, as a part of what is free once the model is loaded"
    ),
    "warm_prompts": Option(
        str, "FILE", "prompts to compute at start and keep in memory: JSON lines with `prompt` or `messages`"
    ),
    "ssd_cache": Option(_boolean, "BOOL", "keep prefixes on the SSD, too (on)"),
    "ssd_cache_dir": Option(str, "DIR", "directory of the SSD cache (default: in the user's cache folder)"),
    "ssd_cache_max_gb": Option(
        _number(float, 0.001, 1e6), "GB", "size of the SSD cache, for all who use it (default: kept in the directory)"
    ),
    "ssd_write_mbps": Option(_number(float, 1, 1e6), "MBPS", "write at most so many MB per second to the SSD"),
    "flush_timeout": Option(_number(float, 0, 1e6), "S", "seconds a stop may take to write prefixes to the SSD"),
    "adapter_path": Option(
        _list, "NAME=PATH", "folder of a LoRA adapter, which is asked for as model NAME; may be given several times"
    ),
    "max_loras": Option(_number(int, 1, 1024), "N", "LoRA adapters in memory, and in one batch, at the same time"),
    "kv_events": Option(
        _address, "HOST:PORT", "publish which prefix blocks are in memory, as vLLM does; the port after it replays"
    ),
    "log_steps": Option(_boolean, "BOOL", "log what the scheduler decides in each step"),
    "models_config": Option(str, "FILE", "TOML file of models to serve, each loaded when it is asked for"),
    "models_memory": Option(parse_gigabytes, "GB", "memory for all models together (default: what the device has)"),
    "idle_ttl": Option(
        _number(float, 0, 1e9),
        "S",
        "unload a model after so many seconds without streams; 0 keeps it until others need it",
    ),
    "load_wait": Option(_number(float, 0, 1e6), "S", "seconds a request waits for its model to be loaded"),
    "preload": Option(_list, "NAME,…", "which models to load at start (default: the first); '' for none"),
    "timeout": Option(_number(float, 0.001, 1e9), "S", "seconds a request may take at most"),
    "drain_timeout": Option(_number(float, 0, 1e9), "S", "seconds running requests may take after SIGTERM"),
    "start_timeout": Option(_number(float, 1, 1e9), "S", "seconds until the model must be loaded"),
    "hang_timeout": Option(
        _number(float, 0.1, 1e9),
        "S",
        "seconds without a step after which the engine is replaced (default: 20 times the slowest step, at least 10)",
    ),
    "zmq_tcp": Option(
        _address, "HOST:PORT", "let programs reach ZeroMQ over tcp too; beyond loopback addresses with --zmq-keys alone"
    ),
    "zmq_keys": Option(
        str, "FILE", "the server's key file of `callboard keys`: tcp is encrypted, and only for its clients"
    ),
    "busy_poll": Option(
        _number(float, 0, 60_000),
        "MS",
        "look for messages without sleeping for so long after the last one: lower latency for two busy cores",
    ),
    "api_key": Option(_list, "KEY", "let in only HTTP requests that bring this key; may be given several times"),
    "api_key_file": Option(str, "FILE", "TOML file of named API keys, with rate limits and token budgets"),
    "trusted_hosts": Option(_list, "HOST,…", "names under which the server may be asked over HTTP (default: any)"),
    "tls_cert": Option(str, "FILE", "certificate chain (PEM): serve HTTPS"),
    "tls_key": Option(str, "FILE", "its private key (PEM)"),
    "log_prompts": Option(_boolean, "BOOL", "log what is asked, too (off)"),
    "otlp_endpoint": Option(
        str, "URL", "send OpenTelemetry traces of requests to this collector (OTLP over HTTP; needs callboard[otel])"
    ),
    "allow_origins": Option(_list, "URL,…", "origins that browsers may call from (CORS); * for all"),
    "blas_threads": Option(_number(int, 1, 1024), "N", "threads of the preloaded BLAS (Linux CPU)"),
    "trust_remote_code": Option(_boolean, "BOOL", "run tokenizer code that comes with the model"),
    "log_level": Option(_log_level, "LEVEL", "debug, info, warning or error"),
    "log_file": Option(str, "FILE", "write the log there, too, and rotate it"),
    "log_max_mb": Option(_number(float, 0.001, 1e6), "MB", "size at which the log file is rotated"),
    "log_keep": Option(_number(int, 1, 1000), "N", "older log files that are kept"),
}


class _Gather(argparse.Action):
    """A flag that may be given several times, each with one value or several."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        earlier = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if earlier is None else f"{earlier},{values}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every option, and `--config`. Flags that are not given stay out of the namespace."""
    defaults = ServeSettings()
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    for name, option in OPTIONS.items():
        default = getattr(defaults, name)
        note = f" (default: {default})" if default not in (None, "", [], False) else ""
        flag = "--" + name.replace("_", "-")
        if option.parse is _boolean:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=option.help
            )
        elif option.parse is _list:
            parser.add_argument(
                flag, metavar=option.metavar, action=_Gather, default=argparse.SUPPRESS, help=option.help + note
            )
        else:
            parser.add_argument(flag, metavar=option.metavar, default=argparse.SUPPRESS, help=option.help + note)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"--config: {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config: {path} is not TOML: {error}") from None
    settings = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            known = ", ".join(option.replace("_", "-") for option in OPTIONS)
            raise SettingsError(f"{path}: no setting is called {key!r}; there are {known}")
        settings[name] = parse_setting(name, value, f"{path}: {key}")
    return settings


def parse_setting(name: str, value: Any, where: str) -> Any:
    """A setting as it stands in a TOML file. Raises SettingsError, which says `where`."""
    if isinstance(value, list):
        value = ",".join(str(item) for item in value)
    elif isinstance(value, dict):
        raise SettingsError(f"{where} must be a single value or a list")
    return _parse(name, str(value), where)


def _parse(name: str, value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return OPTIONS[name].parse(value)
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None


def resolve_settings(flags: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> ServeSettings:
    """Merge the sources. Raises SettingsError naming the setting and where it stands."""
    merged: dict[str, Any] = _from_file(flags.config) if flags.config is not None else {}
    for name in OPTIONS:
        variable = "CALLBOARD_" + name.upper()
        if environment.get(variable):
            merged[name] = _parse(name, environment[variable], variable)
    for name in OPTIONS:
        if hasattr(flags, name):
            merged[name] = _parse(name, getattr(flags, name), "--" + name.replace("_", "-"))
    return check_settings(ServeSettings(**merged))


def check_settings(settings: ServeSettings) -> ServeSettings:
    """The settings, if they go together. Raises SettingsError."""
    if settings.zmq_keys and not settings.zmq_tcp:
        raise SettingsError("--zmq-keys is for --zmq-tcp, which is not given")
    if settings.zmq_tcp and not settings.zmq_keys:
        if settings.api_key or settings.api_key_file:
            raise SettingsError("--zmq-tcp lets everybody in, so together with --api-key it needs --zmq-keys")
        if not is_loopback(settings.zmq_tcp):
            raise SettingsError(
                f"--zmq-tcp {settings.zmq_tcp} can be reached from other machines, so it needs --zmq-keys FILE; "
                "`callboard keys` makes one"
            )
    if settings.kv_events and not is_loopback(settings.kv_events):
        raise SettingsError("--kv-events shows tokens of prompts unencrypted, so it takes loopback addresses only")
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise SettingsError("--tls-cert and --tls-key go together")
    return settings
