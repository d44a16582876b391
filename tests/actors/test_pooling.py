"""Pooling as a model's files say it, in the form of sentence-transformers."""

import json
from pathlib import Path

import pytest

from actors.pooling import read_pooling
from protocol.messages import Pool

LAYERS = "sentence_transformers.models."


def modules(folder: Path, *names: str, pooling: dict | None = None) -> Path:
    """A model folder with these modules, and with the settings of its pooling module."""
    rows = [
        {"idx": number, "name": str(number), "path": f"{number}_{name}" if number else "", "type": LAYERS + name}
        for number, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    if pooling is not None:
        place = folder / f"{names.index('Pooling')}_Pooling"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(pooling))
    return folder


def asked(mode: str) -> dict:
    """Settings as they are written: one mode is on, the others off."""
    off = dict.fromkeys(("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken"), False)
    return {"word_embedding_dimension": 64} | {f"pooling_mode_{name}": on for name, on in (off | {mode: True}).items()}


def test_without_modules_it_is_the_last_token(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pool("last", normalize=True)


@pytest.mark.parametrize(("mode", "pool"), [("mean_tokens", "mean"), ("cls_token", "first"), ("lasttoken", "last")])
@pytest.mark.parametrize("normalize", [True, False])
def test_mode_and_normalization_are_those_of_the_files(tmp_path: Path, mode: str, pool: str, normalize: bool) -> None:
    names = ("Transformer", "Pooling", *["Normalize"] * normalize)
    assert read_pooling(modules(tmp_path, *names, pooling=asked(mode))) == Pool(pool, normalize=normalize)


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        (asked("max_tokens"), "pooling_mode_max_tokens"),
        (asked("mean_tokens") | {"pooling_mode_cls_token": True}, "pooling_mode_cls_token, pooling_mode_mean_tokens"),
        ({"word_embedding_dimension": 64}, "nothing"),
    ],
)
def test_one_that_is_not_known_is_refused_by_name(tmp_path: Path, pooling: dict, named: str) -> None:
    folder = modules(tmp_path, "Transformer", "Pooling", "Normalize", pooling=pooling)
    with pytest.raises(ValueError, match=f"is {named}; known are pooling_mode_lasttoken"):
        read_pooling(folder)


def test_modules_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('{"0": ')
    with pytest.raises(ValueError, match=r"modules\.json can't be read"):
        read_pooling(tmp_path)


def test_a_pooling_module_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is nothing; known are"):
        read_pooling(modules(tmp_path, "Transformer", "Pooling"))
