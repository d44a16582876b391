"""Which models `callboard serve` serves: those of the command line, and those of `--models-config FILE`.

The file is TOML with a table `[models.NAME]` for each: `model` (what `serve` takes), `aliases`, `pin`, `memory`, and
any setting of a single server that is a model's own business, by its flag's name. What it doesn't say holds as it
stands for the whole server. Read once, by the `callboard serve` process.
"""

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from server.settings import (
    ServeSettings,
    SettingsError,
    check_settings,
    parse_gigabytes,
    parse_setting,
)

# Settings that belong to one model; the others are the server's.
OWN = (
    *("task", "tokenizers", "stream_interval", "max_num_seqs", "max_num_batched_tokens", "prefill_step_size"),
    *("max_kv_size", "kv_bits", "kv_group_size", "decode_fairness", "decode_stall_target_ms"),
    *("prefix_cache", "cache_memory_mb", "cache_memory_percent", "warm_prompts", "ssd_cache", "ssd_cache_dir"),
    *("ssd_cache_max_gb", "ssd_write_mbps", "flush_timeout", "adapter_path", "max_loras", "kv_events", "log_steps"),
    *("idle_ttl", "timeout", "drain_timeout", "start_timeout", "hang_timeout", "zmq_tcp", "zmq_keys", "busy_poll"),
    *("blas_threads", "trust_remote_code", "log_level"),
)
# Settings that can't hold for several models at once, and what to use.
ALONE = {
    "served_model_name": "write NAME=MODEL, or aliases in --models-config",
    "memory_limit": "use --models-memory, or memory in --models-config",
    "adapter_path": "set adapter_path for one model in --models-config",
    "warm_prompts": "set warm_prompts for one model in --models-config",
    "kv_events": "set kv_events for one model in --models-config",
    "zmq_tcp": "set zmq_tcp for one model in --models-config",
}


class ModelEntry(msgspec.Struct, frozen=True):
    """One model to serve. `name` is "" where it follows from `spec`; `memory` is in bytes; `settings` are its own."""

    name: str
    spec: str
    settings: ServeSettings
    aliases: list[str] = []
    pin: bool = False
    memory: int | None = None


def is_alone(models: list[str], settings: ServeSettings) -> bool:
    """Whether one model is served, without a house: it is loaded from the start to the end. Raises SettingsError when
    none is named."""
    if not models and not settings.models_config:
        raise SettingsError("name a model to serve, or several, or give --models-config FILE")
    return _is_single(models, settings) and not settings.idle_ttl and settings.preload is None


def _is_single(models: list[str], settings: ServeSettings) -> bool:
    return len(models) == 1 and not settings.models_config


def read_models(models: list[str], settings: ServeSettings) -> list[ModelEntry]:
    """All models to serve, in order. Raises SettingsError."""
    if _is_single(models, settings):  # which comes and goes, and to which all that a single one may have applies
        return [ModelEntry(settings.served_model_name, models[0], settings, memory=settings.memory_limit)]
    defaults = ServeSettings()
    for name, instead in ALONE.items():
        if getattr(settings, name) != getattr(defaults, name):
            raise SettingsError(f"--{name.replace('_', '-')} is for a single model; {instead}")
    entries = [_named(text, settings) for text in models]
    if settings.models_config:
        entries += _from_file(Path(settings.models_config).expanduser(), settings)
    return entries


def _named(text: str, settings: ServeSettings) -> ModelEntry:
    """A model of the command line, `MODEL` or `NAME=MODEL`."""
    name, equals, spec = text.partition("=")
    if not equals or Path(text).expanduser().exists():
        return ModelEntry("", text, settings)
    if not name or not spec:
        raise SettingsError(f"{text!r} is neither MODEL nor NAME=MODEL")
    return ModelEntry(name, spec, settings)


def _from_file(path: Path, settings: ServeSettings) -> list[ModelEntry]:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"--models-config: {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--models-config: {path} is not TOML: {error}") from None
    models = content.pop("models", None)
    if content or not isinstance(models, dict) or not models:
        found = f"; it has {', '.join(content)}" if content else ""
        raise SettingsError(f"{path}: there have to be tables [models.NAME], and nothing else{found}")
    return [_entry(name, table, settings, f"{path}: [models.{name}]") for name, table in models.items()]


def _entry(name: str, table: Any, settings: ServeSettings, where: str) -> ModelEntry:
    if not isinstance(table, dict) or not isinstance(table.get("model", name), str):
        raise SettingsError(f'{where} must be a table with model = "…"')
    own: dict[str, Any] = {}
    aliases: list[str] = []
    pin, memory = False, None
    for key, value in table.items():
        match key.replace("-", "_"):
            case "model":
                pass
            case "aliases" if isinstance(value, list) and all(isinstance(alias, str) for alias in value):
                aliases = value
            case "aliases":
                raise SettingsError(f"{where} aliases must be a list of names")
            case "pin" if isinstance(value, bool):
                pin = value
            case "pin":
                raise SettingsError(f"{where} pin must be true or false")
            case "memory":
                try:
                    memory = parse_gigabytes(str(value))
                except ValueError as error:
                    raise SettingsError(f"{where} memory: {error}") from None
            case setting if setting in OWN:
                own[setting] = parse_setting(setting, value, f"{where} {key}")
            case _:
                known = ", ".join(("model", "aliases", "pin", "memory", *OWN))
                raise SettingsError(f"{where}: no setting is called {key!r}; there are {known}")
    changed = check_settings(msgspec.structs.replace(settings, **own))
    return ModelEntry(name, table.get("model", name), changed, aliases, pin, memory)
