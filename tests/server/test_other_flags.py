"""Flags of other servers: taken, or answered with what to use."""

import argparse
import re
from pathlib import Path

import psutil
import pytest

from server.cli import _parser
from server.other_flags import FLAGS, Instead, Same
from server.settings import OPTIONS, ServeSettings, resolve_settings

# What `serve` takes there, those aside that we have under the same name.
VLLM_MLX = """
--memory-budget-gb --prefill-batch-size --completion-batch-size --mllm-prefill-step-size --enable-prefix-cache
--disable-prefix-cache --prefix-cache-size --no-memory-aware-cache --kv-cache-quantization --kv-cache-quantization-bits
--kv-cache-quantization-group-size --kv-cache-min-quantize-tokens --max-tokens --max-request-tokens
--continuous-batching --gpu-memory-utilization --use-paged-cache --paged-cache-block-size --max-cache-blocks
--chunked-prefill-tokens --enable-mtp --mtp-num-draft-tokens --mtp-optimistic --specprefill --specprefill-threshold
--specprefill-keep-pct --specprefill-backbone-pct --specprefill-draft-model --prefix-trie-cache
--prefix-trie-cache-size --prefix-trie-cache-memory-mb --mllm-draft-model --mllm-draft-kind --mllm-draft-block-size
--default-mllm-draft --mcp-config --rate-limit --enable-metrics --auto-unload-idle-seconds --lazy-load-model
--max-audio-upload-mb --max-tts-input-chars --enable-auto-tool-choice --tool-call-parser --reasoning-parser --mllm
--default-temperature --default-top-p --default-thinking-token-budget --default-chat-template-kwargs --default-top-k
--default-min-p --default-presence-penalty --default-repetition-penalty --embedding-model --embedding-max-length
--embedding-overflow-policy --rerank-model --download-timeout --download-retries --offline
"""
OMLX = """
--model-dir --max-model-memory --max-process-memory --pin --max-concurrent-requests --completion-batch-size
--embedding-batch-size --memory-guard --memory-guard-gb --paged-ssd-cache-dir --paged-ssd-cache-max-size
--paged-ssd-cache-clear-on-unload --hot-cache-max-size --no-cache --initial-cache-blocks --mcp-config --hf-endpoint
--hf-cache --no-hf-cache --ms-endpoint --http-proxy --https-proxy --no-proxy --ca-bundle --base-path
--sse-keepalive-mode
"""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """That of `callboard serve`."""
    commands = next(action.choices for action in _parser()._actions if action.dest == "command")
    assert isinstance(commands, dict)
    serve = commands["serve"]
    assert isinstance(serve, argparse.ArgumentParser)
    return serve


def settings_of(line: str) -> ServeSettings:
    """What `callboard serve MODEL` makes of these flags."""
    return resolve_settings(_parser().parse_args(["serve", "m", *line.split()]), {})


def test_every_flag_of_vllm_mlx_and_omlx_is_answered(parser: argparse.ArgumentParser):
    assert {*VLLM_MLX.split(), *OMLX.split()} <= FLAGS.keys()
    assert FLAGS.keys() <= parser._option_string_actions.keys()


def test_a_command_line_of_vllm_mlx_works():
    line = "--continuous-batching --use-paged-cache --no-memory-aware-cache --max-num-seqs 9 --cache-memory-mb 50"
    line += " --kv-cache-quantization --kv-cache-quantization-bits 4 --disable-prefix-cache --tool-call-parser hermes"
    settings = settings_of(line)
    assert (settings.max_num_seqs, settings.cache_memory_mb, settings.kv_bits) == (9, 50, 4)
    assert settings.prefix_cache is False
    line = "--memory-budget-gb 24 --auto-unload-idle-seconds 300 --lazy-load-model --prefix-trie-cache"
    line += " --prefix-trie-cache-memory-mb 70 --embedding-overflow-policy error --embedding-max-length auto"
    settings = settings_of(f"{line} --download-retries 5")
    assert (settings.models_memory, settings.idle_ttl, settings.preload) == (24 << 30, 300.0, [])
    assert (settings.prefix_cache, settings.cache_memory_mb) == (True, 70)


def test_a_command_line_of_omlx_works():
    line = (
        "--max-concurrent-requests 7 --hot-cache-max-size 2GB --paged-ssd-cache-dir /x --paged-ssd-cache-max-size 1TB"
    )
    settings = settings_of(line)
    assert (settings.max_num_seqs, settings.cache_memory_mb, settings.ssd_cache_dir) == (7, 2048, "/x")
    assert settings.ssd_cache_max_gb == pytest.approx(1024**4 / 1e9, rel=1e-4)
    settings = settings_of("--hot-cache-max-size 20% --paged-ssd-cache-max-size auto --max-process-memory disabled")
    assert settings.cache_memory_mb == int(psutil.virtual_memory().total / 5) >> 20
    assert (settings.ssd_cache_max_gb, settings.models_memory) == (None, None)
    for flag in ("--max-model-memory 32GB", "--max-process-memory 32GB", "--memory-guard-gb 32"):
        assert settings_of(f"{flag} --memory-guard balanced").models_memory == 32 << 30


def test_a_command_line_of_mlx_lm_works():
    line = "--decode-concurrency 8 --prompt-cache-bytes 1073741824 --allowed-origins a --log-level INFO"
    settings = settings_of(line)
    assert (settings.max_num_seqs, settings.cache_memory_mb, settings.log_level) == (8, 1024, "info")
    assert settings.allow_origins == ["a"]


def test_model_as_a_flag_is_not_ambiguous():
    args = _parser().parse_args(["serve", "--model", "there", "--port", "0"])
    assert (args.models, args.named_models) == ([], ["there"])


@pytest.mark.parametrize("flag", [flag for flag, meaning in FLAGS.items() if isinstance(meaning, Instead)])
def test_what_cannot_be_had_names_what_to_use(
    parser: argparse.ArgumentParser, flag: str, capsys: pytest.CaptureFixture[str]
):
    meaning = FLAGS[flag]
    assert isinstance(meaning, Instead)
    with pytest.raises(SystemExit):
        parser.parse_args([flag, *(["1"] if meaning.takes else [])])
    assert meaning.use.split()[0] in capsys.readouterr().err
    for value in meaning.unless:
        parser.parse_args([flag, value])


def test_what_means_the_same_is_an_option_of_ours(parser: argparse.ArgumentParser):
    assert {meaning.name for meaning in FLAGS.values() if isinstance(meaning, Same)} <= OPTIONS.keys()
    for flag, value in (("--hot-cache-max-size", "much"), ("--paged-ssd-cache-max-size", "20%")):
        with pytest.raises(SystemExit):
            parser.parse_args([flag, value])
    assert "--continuous-batching" not in parser.format_help()


def test_every_flag_stands_in_the_guide():
    text = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text(encoding="utf-8")
    assert FLAGS.keys() <= set(re.findall(r"`(--[a-z-]+)`", text))
