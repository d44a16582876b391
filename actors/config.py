"""The settings of one cast: written once by the supervisor, read by every actor process at its start."""

from pathlib import Path

import msgspec


class CastConfig(msgspec.Struct, frozen=True):
    """Settings that the actors of one cast share. Times are in seconds, sizes in tokens unless named;
    `memory_limit` is in bytes.

    `model_path` is a local folder with `config.json` and weights; `model_name` is what clients call it. `task` is
    generate, embed or rank. `zmq_tcp` is a `host:port` where the streamer listens too, if any, with the
    keys of the file `zmq_keys`, which may be missing on a loopback address. At `kv_events` the engine publishes KV
    events; at the port after it, it sends them again.
    `cache_memory_percent`, a part of 1, is of the memory that is free once the model is loaded. Without
    `ssd_cache_dir` no prefix is kept on the SSD. `adapters` are folders of LoRA adapters, by the names that clients
    choose them by; `max_loras` of them are in memory at once. Streamer and engine look for messages without sleeping
    for `busy_poll` seconds after the last one. In a `house` of several models the cast comes and goes.
    """

    model_path: str
    model_name: str
    run_dir: str
    task: str = "generate"
    tokenizers: int = 1
    stream_interval: int = 1
    timeout: float = 600.0
    drain_timeout: float = 30.0
    start_timeout: float = 300.0
    hang_timeout: float | None = None
    zmq_tcp: str = ""
    zmq_keys: str = ""
    busy_poll: float = 0.0
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
    adapters: dict[str, str] = {}
    max_loras: int = 8
    kv_events: str = ""
    log_steps: bool = False
    blas_threads: int | None = None
    trust_remote_code: bool = False
    log_level: str = "info"
    house: bool = False

    @property
    def max_waiting(self) -> int:
        """How many requests may wait for a row before new ones are refused as `queue_full`."""
        return max(4 * self.max_num_seqs, 32)


def config_path(run_dir: Path) -> Path:
    """Where the settings of the instance in `run_dir` lie."""
    return run_dir / "config.json"


def write_config(config: CastConfig) -> None:
    """Write the settings for the actors to read."""
    config_path(Path(config.run_dir)).write_bytes(msgspec.json.encode(config))


def read_config(run_dir: Path) -> CastConfig:
    """Read the settings of the instance in `run_dir`."""
    return msgspec.json.decode(config_path(run_dir).read_bytes(), type=CastConfig)
