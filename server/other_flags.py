"""Flags of other servers that mean something here, accepted by `serve` under the names they have there.

mlx_lm.server, vllm-mlx, oMLX and vLLM. What has a counterpart sets it; what is always so here is taken and does
nothing; what can't be had is answered with what to use. None of them shows in the help; docs/migrate.md lists them.
"""

import argparse
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil


class Same(NamedTuple):
    """The flag sets our option `name`; `change` makes our value of its (None: ours without the flag), a switch has the
    value `value`."""

    name: str
    change: Callable[[str], str | None] = str
    value: str | None = None


class Always(NamedTuple):
    """What the flag asks for is always so. `takes` says whether a value follows."""

    takes: bool = False


class Instead(NamedTuple):
    """The flag can't be had; `use` says what to use. `takes` says whether a value follows, and `unless` names values
    that ask for what is always so."""

    use: str
    takes: bool = True
    unless: tuple[str, ...] = ()


def _size(text: str) -> int:
    """Bytes of a size such as 8GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 8GB")
    return int(float(match[1]) * 1024.0 ** " kmgt".index(match[2] or " "))


def _memory(text: str) -> int:
    """Bytes of a size, or of a part of this machine's memory such as 20%."""
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    return int(float(percent[1]) / 100 * psutil.virtual_memory().total) if percent else _size(text)


def _in_mb(text: str) -> str:
    return str(_memory(text) >> 20)


def _in_gb(text: str) -> str | None:
    return None if text.lower() == "auto" else f"{_size(text) / 1e9:g}"


def _budget(text: str) -> str | None:
    return None if text.lower() in ("auto", "disabled") else f"{_memory(text)}B"


_DEFAULTS = Instead("the request's own option, or the model's generation_config.json")
_AUTO = Always(takes=True)  # found out from the model
_NO_DRAFTS = "nothing: there is no speculative decoding"
_NO_IMAGES = "a text model: images are not served yet"
_NO_AUDIO = "another server for audio: it is not served here"
_NO_SKIPPING = "nothing: all tokens of a prompt are computed, and those of a known prefix only once"
_BY_BYTES = Instead("--cache-memory-mb: prefixes are kept by bytes, not by number")

FLAGS: dict[str, Same | Always | Instead] = {
    # mlx_lm.server
    "--draft-model": Instead(_NO_DRAFTS),
    "--num-draft-tokens": Instead(_NO_DRAFTS),
    "--pipeline": Instead("nothing: a model runs on one machine", takes=False),
    "--allowed-origins": Same("allow_origins"),
    "--decode-concurrency": Same("max_num_seqs"),
    "--prompt-concurrency": Always(takes=True),
    "--prompt-cache-bytes": Same("cache_memory_mb", _in_mb),
    "--prompt-cache-size": _BY_BYTES,
    "--temp": _DEFAULTS,
    "--top-p": _DEFAULTS,
    "--top-k": _DEFAULTS,
    "--min-p": _DEFAULTS,
    "--chat-template": Instead("the model's own template, or chat_template.jinja in its folder"),
    "--chat-template-args": Instead("chat_template_kwargs in the request"),
    "--use-default-chat-template": Always(),
    "--quantized-kv-start": Always(takes=True),
    # vllm-mlx
    "--continuous-batching": Always(),
    "--use-paged-cache": Always(),
    "--no-memory-aware-cache": Always(),
    "--enable-prefix-cache": Same("prefix_cache", value="true"),
    "--disable-prefix-cache": Same("prefix_cache", value="false"),
    "--prefix-cache-size": _BY_BYTES,
    "--paged-cache-block-size": Always(takes=True),
    "--max-cache-blocks": Instead("--cache-memory-mb"),
    "--prefill-batch-size": Always(takes=True),
    "--completion-batch-size": Same("max_num_seqs"),
    "--chunked-prefill-tokens": Same("prefill_step_size"),
    "--kv-cache-quantization": Same("kv_bits", value="8"),
    "--kv-cache-quantization-bits": Same("kv_bits"),
    "--kv-cache-quantization-group-size": Same("kv_group_size"),
    "--kv-cache-min-quantize-tokens": Always(takes=True),
    "--enable-auto-tool-choice": Always(),
    "--tool-call-parser": _AUTO,
    "--reasoning-parser": _AUTO,
    "--enable-metrics": Always(),
    "--max-tokens": Instead("max_tokens in the request; without it an answer may fill the context"),
    "--max-request-tokens": Instead("tokens_per_minute of a key in --api-key-file"),
    "--rate-limit": Instead("requests_per_minute of a key in --api-key-file"),
    "--default-temperature": _DEFAULTS,
    "--default-top-p": _DEFAULTS,
    "--default-top-k": _DEFAULTS,
    "--default-min-p": _DEFAULTS,
    "--default-chat-template-kwargs": Instead("chat_template_kwargs in the request"),
    "--embedding-model": Instead(
        'task = "embed" for a model in --models-config, or callboard serve MODEL --task embed'
    ),
    "--rerank-model": Instead('task = "rerank" for a model in --models-config, or callboard serve MODEL --task rerank'),
    "--mcp-config": Instead("tools in the request"),
    "--mllm": Instead(_NO_IMAGES, takes=False),
    "--offline": Instead("the environment: HF_HUB_OFFLINE=1", takes=False),
    "--memory-budget-gb": Same("models_memory"),
    "--auto-unload-idle-seconds": Same("idle_ttl"),
    "--lazy-load-model": Same("preload", value=""),
    "--enable-mtp": Instead(_NO_DRAFTS, takes=False),
    "--mtp-num-draft-tokens": Instead(_NO_DRAFTS),
    "--mtp-optimistic": Instead(_NO_DRAFTS, takes=False),
    "--specprefill": Instead(_NO_SKIPPING, takes=False),
    "--specprefill-threshold": Instead(_NO_SKIPPING),
    "--specprefill-keep-pct": Instead(_NO_SKIPPING),
    "--specprefill-backbone-pct": Instead(_NO_SKIPPING),
    "--specprefill-draft-model": Instead(_NO_SKIPPING),
    "--prefix-trie-cache": Same("prefix_cache", value="true"),
    "--prefix-trie-cache-size": _BY_BYTES,
    "--prefix-trie-cache-memory-mb": Same("cache_memory_mb"),
    "--mllm-prefill-step-size": Instead(_NO_IMAGES),
    "--mllm-draft-model": Instead(_NO_DRAFTS),
    "--mllm-draft-kind": Instead(_NO_DRAFTS),
    "--mllm-draft-block-size": Instead(_NO_DRAFTS),
    "--default-mllm-draft": Instead(_NO_DRAFTS, takes=False),
    "--default-presence-penalty": Instead("presence_penalty in the request"),
    "--default-repetition-penalty": _DEFAULTS,
    "--default-thinking-token-budget": Instead("thinking_token_budget in the request"),
    "--embedding-max-length": Instead("nothing: an input may fill the model's context", unless=("auto",)),
    "--embedding-overflow-policy": Instead("nothing: an input that is too long is refused", unless=("error",)),
    "--download-timeout": Instead("the environment: HF_HUB_DOWNLOAD_TIMEOUT"),
    "--download-retries": Always(takes=True),
    "--max-audio-upload-mb": Instead(_NO_AUDIO),
    "--max-tts-input-chars": Instead(_NO_AUDIO),
    # oMLX
    "--max-concurrent-requests": Same("max_num_seqs"),
    "--hot-cache-max-size": Same("cache_memory_mb", _in_mb),
    "--paged-ssd-cache-dir": Same("ssd_cache_dir"),
    "--paged-ssd-cache-max-size": Same("ssd_cache_max_gb", _in_gb),
    "--initial-cache-blocks": Always(takes=True),
    "--no-cache": Same("prefix_cache", value="false"),
    "--max-process-memory": Same("models_memory", _budget),
    "--max-model-memory": Same("models_memory", _budget),
    "--memory-guard": Instead("--models-memory GB", unless=("balanced",)),
    "--memory-guard-gb": Same("models_memory"),
    "--model-dir": Instead("the models themselves: callboard serve FOLDER/A FOLDER/B"),
    "--pin": Instead("pin = true for a model in --models-config, or callboard pin MODEL"),
    "--paged-ssd-cache-clear-on-unload": Instead("callboard cache clear", takes=False),
    "--embedding-batch-size": Always(takes=True),
    "--sse-keepalive-mode": Instead("nothing: a comment is sent while a stream is silent", unless=("comment",)),
    "--hf-cache": Always(),
    "--no-hf-cache": Always(),
    "--hf-endpoint": Instead("the environment: HF_ENDPOINT"),
    "--ms-endpoint": Instead("a folder, or a model of the Hugging Face hub"),
    "--http-proxy": Instead("the environment: HTTP_PROXY"),
    "--https-proxy": Instead("the environment: HTTPS_PROXY"),
    "--no-proxy": Instead("the environment: NO_PROXY"),
    "--ca-bundle": Instead("the environment: SSL_CERT_FILE"),
    "--base-path": Instead("the environment: CALLBOARD_HOME"),
    # vLLM
    "--enable-prefix-caching": Same("prefix_cache", value="true"),
    "--no-enable-prefix-caching": Same("prefix_cache", value="false"),
    "--enable-chunked-prefill": Always(),
    "--gpu-memory-utilization": Instead("--memory-limit SIZE"),
    "--max-model-len": Instead("nothing: rows take only the memory they need, so the model's own context is no cost"),
    "--ssl-certfile": Same("tls_cert"),
    "--ssl-keyfile": Same("tls_key"),
    "--disable-log-requests": Always(),
}


class _Same(argparse.Action):
    def __init__(self, *args: Any, same: Same, **options: Any) -> None:
        self._same = same
        super().__init__(*args, **options)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        same = self._same
        try:
            value = same.value if same.value is not None else same.change(values)
        except ValueError as error:
            parser.error(f"{option_string}: {error}")
        if value is None or (same.name == "kv_bits" and same.value and hasattr(namespace, same.name)):
            return  # ours as it is; a switch beside its bits
        setattr(namespace, same.name, value)


class _Always(argparse.Action):
    def __call__(self, *_: Any) -> None:
        return None


class _Instead(argparse.Action):
    def __init__(self, *args: Any, instead: Instead, **options: Any) -> None:
        self._instead = instead
        super().__init__(*args, **options)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if values not in self._instead.unless:
            parser.error(f"{option_string} is not taken here; use {self._instead.use}")


def add_other_flags(parser: argparse.ArgumentParser) -> None:
    """Accept them, those aside that the parser has of its own."""
    known = {flag for action in parser._actions for flag in action.option_strings}
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument("--model", action="append", dest="named_models", **hidden)
    for flag, meaning in FLAGS.items():
        if flag in known:
            continue
        match meaning:
            case Same(value=value):
                nargs = None if value is None else 0
                parser.add_argument(flag, action=_Same, same=meaning, nargs=nargs, **hidden)
            case Always(takes=takes):
                parser.add_argument(flag, action=_Always, nargs=None if takes else 0, **hidden)
            case Instead(takes=takes):
                parser.add_argument(flag, action=_Instead, instead=meaning, nargs=None if takes else 0, **hidden)
