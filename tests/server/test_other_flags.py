"""Flags of other servers: taken, or answered with what to use."""

import argparse
import re
from pathlib import Path

import pytest

from server.cli import _parser
from server.other_flags import FLAGS, Instead, Same, add_other_flags
from server.settings import OPTIONS, add_options, resolve_settings


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    add_other_flags(parser)
    return parser


def test_a_command_line_of_vllm_mlx_works(parser: argparse.ArgumentParser):
    line = "--continuous-batching --use-paged-cache --no-memory-aware-cache --max-num-seqs 9 --cache-memory-mb 50"
    line += " --kv-cache-quantization --kv-cache-quantization-bits 4 --disable-prefix-cache --tool-call-parser hermes"
    settings = resolve_settings(parser.parse_args(line.split()), {})
    assert (settings.max_num_seqs, settings.cache_memory_mb, settings.kv_bits) == (9, 50, 4)
    assert settings.prefix_cache is False


def test_a_command_line_of_omlx_works(parser: argparse.ArgumentParser):
    line = (
        "--max-concurrent-requests 7 --hot-cache-max-size 2GB --paged-ssd-cache-dir /x --paged-ssd-cache-max-size 1TB"
    )
    settings = resolve_settings(parser.parse_args(line.split()), {})
    assert (settings.max_num_seqs, settings.cache_memory_mb, settings.ssd_cache_dir) == (7, 2048, "/x")
    assert settings.ssd_cache_max_gb == pytest.approx(1024**4 / 1e9, rel=1e-4)


def test_a_command_line_of_mlx_lm_works(parser: argparse.ArgumentParser):
    line = "--decode-concurrency 8 --prompt-cache-bytes 1073741824 --allowed-origins a --log-level INFO"
    settings = resolve_settings(parser.parse_args(line.split()), {})
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


def test_what_means_the_same_is_an_option_of_ours(parser: argparse.ArgumentParser):
    assert {meaning.name for meaning in FLAGS.values() if isinstance(meaning, Same)} <= OPTIONS.keys()
    with pytest.raises(SystemExit):
        parser.parse_args(["--hot-cache-max-size", "much"])
    assert "--continuous-batching" not in parser.format_help()


def test_every_flag_stands_in_the_guide():
    text = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text(encoding="utf-8")
    assert FLAGS.keys() <= set(re.findall(r"`(--[a-z-]+)`", text))
