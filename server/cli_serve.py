"""`callboard serve`: from settings to a running system.

Opens the listening socket, takes the name, makes the model ready, and becomes the supervisor. Everything the
supervisor starts dies with this process.
"""

import argparse
import os
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO, cast

import msgspec
from rich.console import Console

from actors.adapter_files import parse_adapter, read_adapter
from actors.config import CastConfig
from actors.keeper import HttpSpec
from actors.log_file import LogFile, Tee
from actors.logs import configure_logs
from actors.rundir import NameTaken, RunDirectory
from actors.supervision import Supervision
from actors.supervisor import Supervisor, raise_file_limit
from protocol.endpoints import home
from server import traces
from server.cli_cache import default_directory
from server.key_file import ApiKey, KeyFileError, plain_key, read_key_file
from server.models.device import installed_device, missing_backend_hint
from server.models.errors import ModelError
from server.models.resolve import resolve_model
from server.models_config import is_alone, read_models
from server.options import API_KEYS_VARIABLE, HttpOptions
from server.settings import ServeSettings, SettingsError, resolve_settings

RECENT_LOG = 512 << 10  # bytes of the log kept in the run directory, for the dashboard
BACKLOG = 4096  # connections that may arrive at once; the system caps it (somaxconn)


class CannotServe(Exception):
    """The server can't start; the text is for the user."""


def serve(args: argparse.Namespace) -> int:
    """Run a server until it is stopped. 0 after an orderly end, 1 with the cause on stderr otherwise."""
    try:
        settings = resolve_settings(args)
        alone = is_alone(args.models, settings)
        configure_logs(settings.log_level, actor="supervisor")
        device = installed_device()
        if device is None:
            raise CannotServe(missing_backend_hint())
        with listen(settings) as listener:
            if alone:
                return _run(args.models[0], device, settings, listener)
            from server.cli_house import run_house

            return run_house(read_models(args.models, settings), device, settings, listener)
    except (SettingsError, ModelError, NameTaken, CannotServe) as error:
        print(f"callboard: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("callboard: interrupted", file=sys.stderr)
    return 1


def listen(settings: ServeSettings) -> socket.socket:
    """The one listening socket. Raises CannotServe when host or port can't be used."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotServe(
            f"can't listen on {settings.host}:{settings.port}: {error.strerror or error}; "
            "choose another address with --host or --port (0 takes a free one)"
        ) from None
    listener.setblocking(False)
    return listener


def _run(spec: str, device: str, settings: ServeSettings, listener: socket.socket) -> int:
    keys = read_keys(settings)
    run_dir = make_run_directory(settings, listener)
    try:
        keep_log = keep_logs(settings, run_dir)
        adapters = find_adapters(settings)
        model_path = resolve_model(spec, device=device)
        model_name = settings.served_model_name or served_name(spec, model_path)
        if model_name in adapters:
            raise CannotServe(f"the model and an adapter are both called {model_name!r}; see --served-model-name")
        advise_file_limit()
        config = cast_config(settings, model_name, model_path, adapters, run_dir.path)
        http = http_spec(settings, listener, keys, model_name)
    except BaseException:
        run_dir.remove()
        raise

    def on_ready(table: Supervision) -> None:
        print_welcome(http.url, run_dir.name, model_name, table)

    try:
        return Supervisor(config, run_dir, http, on_ready, keep_log=keep_log).run()
    except OSError as error:
        raise CannotServe(f"the server can't be started: {error}") from error


def make_run_directory(settings: ServeSettings, listener: socket.socket) -> RunDirectory:
    """Take the name. Raises NameTaken and CannotServe."""
    try:
        return RunDirectory.create(settings.name or str(listener.getsockname()[1]))
    except ValueError as error:
        raise CannotServe(str(error)) from None
    except OSError as error:
        raise CannotServe(f"no run directory can be made in {home()}: {error}; set CALLBOARD_HOME") from None


def advise_file_limit() -> None:
    """Raise the limit of open files; where that can't be done, tell what to do."""
    advice = raise_file_limit()
    if advice:
        print(f"callboard: {advice}", file=sys.stderr)


def cast_config(
    settings: ServeSettings, model_name: str, model_path: Path, adapters: dict[str, str], run_dir: Path
) -> CastConfig:
    """What the actors of one model have to know."""
    return CastConfig(
        model_path=str(model_path),
        model_name=model_name,
        run_dir=str(run_dir),
        task=settings.task,
        tokenizers=settings.tokenizers,
        stream_interval=settings.stream_interval,
        timeout=settings.timeout,
        drain_timeout=settings.drain_timeout,
        start_timeout=settings.start_timeout,
        hang_timeout=settings.hang_timeout,
        zmq_tcp=settings.zmq_tcp,
        zmq_keys=str(Path(settings.zmq_keys).expanduser().absolute()) if settings.zmq_keys else "",
        busy_poll=settings.busy_poll / 1000,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        prefill_step_size=settings.prefill_step_size,
        max_kv_size=settings.max_kv_size,
        kv_bits=settings.kv_bits,
        kv_group_size=settings.kv_group_size,
        decode_fairness=settings.decode_fairness,
        decode_stall_target_ms=settings.decode_stall_target_ms,
        memory_limit=settings.memory_limit or settings.models_memory,
        prefix_cache=settings.prefix_cache,
        cache_memory_mb=settings.cache_memory_mb,
        cache_memory_percent=settings.cache_memory_percent,
        warm_prompts=str(Path(settings.warm_prompts).absolute()) if settings.warm_prompts else "",
        ssd_cache=settings.ssd_cache,
        ssd_cache_dir=str(Path(settings.ssd_cache_dir or default_directory()).expanduser().absolute()),
        ssd_cache_max_gb=settings.ssd_cache_max_gb,
        ssd_write_mbps=settings.ssd_write_mbps,
        flush_timeout=settings.flush_timeout,
        adapters=adapters,
        max_loras=settings.max_loras,
        kv_events=settings.kv_events,
        log_steps=settings.log_steps,
        blas_threads=settings.blas_threads,
        trust_remote_code=settings.trust_remote_code,
        log_level=settings.log_level,
    )


def http_spec(
    settings: ServeSettings, listener: socket.socket, keys: list[ApiKey], model: str, models: Iterable[str] = ()
) -> HttpSpec:
    """How to run the HTTP workers, for one `model`, or for several `models`. Raises CannotServe."""
    port = listener.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    options = HttpOptions(
        model_name=model,
        models=list(models),
        load_wait=settings.load_wait,
        allow_origins=settings.allow_origins,
        trusted_hosts=settings.trusted_hosts,
        tls_cert=_existing("--tls-cert", settings.tls_cert),
        tls_key=_existing("--tls-key", settings.tls_key),
        log_prompts=settings.log_prompts,
        traces=_traced(settings.otlp_endpoint),
        otlp_endpoint=settings.otlp_endpoint,
        log_level=settings.log_level,
    )
    return HttpSpec(
        "server.worker",
        msgspec.json.encode(options).decode(),
        listener,
        settings.http_workers,
        f"{'https' if settings.tls_cert else 'http'}://{host}:{port}",
        {API_KEYS_VARIABLE: msgspec.json.encode(keys).decode()} if keys else {},
    )


def _traced(endpoint: str) -> bool:
    """Whether requests are traced. Raises CannotServe when that was asked for by our own flag and can't be done."""
    if not traces.wanted(endpoint, os.environ):
        return False
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise CannotServe(f"--otlp-endpoint: {endpoint!r} is no http URL, such as http://127.0.0.1:4318")
    lacking = traces.missing()
    if lacking and endpoint:
        raise CannotServe(f"--otlp-endpoint: {lacking}")
    if lacking:
        print(f"callboard: {lacking} (OpenTelemetry's variables name a collector)", file=sys.stderr)
    return not lacking


def read_keys(settings: ServeSettings) -> list[ApiKey]:
    """All API keys. Raises CannotServe."""
    keys = [plain_key(key) for key in settings.api_key]
    if settings.api_key_file:
        try:
            keys += read_key_file(Path(settings.api_key_file).expanduser())
        except KeyFileError as error:
            raise CannotServe(f"--api-key-file: {error}") from None
    return keys


def _existing(flag: str, file: str) -> str:
    """The absolute path of a file that must be there. Raises CannotServe."""
    if not file:
        return ""
    path = Path(file).expanduser().absolute()
    if not os.access(path, os.R_OK):
        raise CannotServe(f"{flag}: {file} can't be read")
    return str(path)


def keep_logs(settings: ServeSettings, run_dir: RunDirectory) -> Callable[[bytes], None]:
    """Have the log kept in the run directory, and in the file that was asked for. Raises CannotServe."""
    files = [LogFile(run_dir.path / "log", RECENT_LOG)]
    if settings.log_file:
        try:
            path = Path(settings.log_file).expanduser().absolute()
            files.append(LogFile(path, int(settings.log_max_mb * 1e6), settings.log_keep))
        except OSError as error:
            raise CannotServe(f"--log-file: {settings.log_file} can't be written: {error.strerror}") from None
    configure_logs(settings.log_level, cast(TextIO, Tee(files)), actor="supervisor")

    def keep(line: bytes) -> None:
        for file in files:
            file.write(line)

    return keep


def find_adapters(settings: ServeSettings) -> dict[str, str]:
    """The folders of the LoRA adapters, by name. Raises CannotServe for those that can't be served."""
    adapters: dict[str, str] = {}
    if settings.adapter_path and settings.task != "generate":
        raise CannotServe("--adapter-path is for servers that generate text; leave --task away")
    for text in settings.adapter_path:
        try:
            name, folder = parse_adapter(text)
            read_adapter(name, folder)
        except ValueError as error:
            raise CannotServe(f"--adapter-path: {error}") from None
        if name in adapters:
            raise CannotServe(f"--adapter-path: two adapters are called {name!r}; write NAME=PATH")
        adapters[name] = str(folder)
    return adapters


def served_name(spec: str, path: Path) -> str:
    """What clients call the model: the hub id, `demo`, or the folder's name."""
    return path.resolve().name if Path(spec).exists() else spec


def print_welcome(url: str, name: str, model: str, table: Supervision) -> None:
    """Say where the server listens, what it serves, who works for it, and how to try it."""
    console = Console(highlight=False, soft_wrap=True)
    actors = "  ".join(f"{slot.name} {slot.pid}" for slot in table.slots)
    context = f", context {table.card.context} tokens" if table.card else ""
    console.print(f"[bold]Callboard[/bold] serves {model}{context}")
    console.print(f"  HTTP    {url}/v1")
    console.print(f"  watch   {url}/admin")
    console.print(f"  ZeroMQ  protocol.Client({name!r})", markup=False)
    console.print(f"  actors  {actors}")
    console.print("Try it:")
    print(
        f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d "
        f'\'{{"model": "{model}", "messages": [{{"role": "user", "content": '
        f'"What is the capital of France?"}}], "temperature": 0}}\'',
        flush=True,
    )
