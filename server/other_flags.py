"""Flags of other servers that mean something here, accepted by `serve` under the names they have there.

mlx_lm.server, vllm-mlx, oMLX and vLLM. What has a counterpart sets it; what is always so here is taken and does
nothing; what can't be had is answered with what to use. None of them shows in the help; docs/migrate.md lists them.
"""

import argparse
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Same(NamedTuple):
    """The flag sets our option `name`; `change` makes our value of its, a switch has the value `value`."""

    name: str
    change: Callable[[str], str] = str
    value: str | None = None


class Always(NamedTuple):
    """What the flag asks for is always so. `takes` says whether a value follows."""

    takes: bool = False


class Instead(NamedTuple):
    """The flag can't be had; `use` says what to use. `takes` says whether a value follows."""

    use: str
    takes: bool = True


def _bytes_in_mb(text: str) -> str:
    return str(int(text) >> 20)


def _mb(text: str) -> str:
    """A size such as 8GB in MB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 8GB")
    return str(int(float(match[1]) * 1024.0 ** (" kmgt".index(match[2] or " ")) / 1024**2))


def _gb(text: str) -> str:
    return f"{int(_mb(text)) * 1024**2 / 1e9:g}"


_DEFAULTS = Instead("the request's own option, or the model's generation_config.json")
_AUTO = Always(takes=True)  # found out from the model

FLAGS: dict[str, Same | Always | Instead] = {
    # mlx_lm.server
    "--draft-model": Instead("nothing: there is no speculative decoding"),
    "--num-draft-tokens": Instead("nothing: there is no speculative decoding"),
    "--pipeline": Instead("nothing: a model runs on one machine", takes=False),
    "--allowed-origins": Same("allow_origins"),
    "--decode-concurrency": Same("max_num_seqs"),
    "--prompt-concurrency": Always(takes=True),
    "--prompt-cache-bytes": Same("cache_memory_mb", _bytes_in_mb),
    "--prompt-cache-size": Instead("--cache-memory-mb: prefixes are kept by bytes, not by number"),
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
    "--prefix-cache-size": Instead("--cache-memory-mb: prefixes are kept by bytes, not by number"),
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
    "--mllm": Instead("a text model: images are not served yet", takes=False),
    "--offline": Instead("the environment: HF_HUB_OFFLINE=1", takes=False),
    # oMLX
    "--max-concurrent-requests": Same("max_num_seqs"),
    "--hot-cache-max-size": Same("cache_memory_mb", _mb),
    "--paged-ssd-cache-dir": Same("ssd_cache_dir"),
    "--paged-ssd-cache-max-size": Same("ssd_cache_max_gb", _gb),
    "--initial-cache-blocks": Always(takes=True),
    "--no-cache": Same("prefix_cache", value="false"),
    "--max-process-memory": Same("memory_limit"),
    "--model-dir": Instead("the models themselves: callboard serve FOLDER/A FOLDER/B"),
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
        if not (same.name == "kv_bits" and same.value and hasattr(namespace, same.name)):  # a switch beside its bits
            setattr(namespace, same.name, value)


class _Always(argparse.Action):
    def __call__(self, *_: Any) -> None:
        return None


class _Instead(argparse.Action):
    def __init__(self, *args: Any, use: str, **options: Any) -> None:
        self._use = use
        super().__init__(*args, **options)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        parser.error(f"{option_string} is not taken here; use {self._use}")


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
            case Instead(use=use, takes=takes):
                parser.add_argument(flag, action=_Instead, use=use, nargs=None if takes else 0, **hidden)
