import json
from pathlib import Path

import pytest

from server.models import resolve
from server.models.errors import ModelError
from server.models.resolve import resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all that is looked at before a model is loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(bytes(16))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def refusal(spec: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(str(spec), progress=False)
    return str(caught.value)


def test_takes_a_folder(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder


def test_gives_an_absolute_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("./model") == folder
    assert resolve_model("model") == folder
    assert resolve_model("~/model") == folder


def test_a_folder_goes_before_a_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    assert resolve_model(f"{folder.parent.name}/model") == folder


@pytest.mark.parametrize("spec", ["nothing", "./org/name", "/no/such/folder", "a/b/c", "", "~/nothing here"])
def test_what_is_no_folder_and_no_hub_id(spec: str) -> None:
    assert f"There is no folder {spec!r}" in refusal(spec)
    assert "org/name" in refusal(spec)


def test_a_file(folder: Path) -> None:
    assert "is a file" in refusal(folder / "model.safetensors")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": 1}', "\xff"])
def test_a_config_that_names_no_model(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert "model_type" in refusal(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights (model*.safetensors)." in refusal(folder)


def test_weights_of_another_kind(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has pytorch_model.bin" in refusal(folder)
    assert "mlx_lm.convert" in refusal(folder)


def test_a_missing_shard(folder: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "lacks 1 of its weight files, the first is model-2.safetensors" in refusal(folder)


def test_an_unreadable_index_is_left_to_the_loader(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")
    assert resolve_model(str(folder)) == folder


def test_a_git_lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in refusal(folder)


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer" in refusal(folder)


def test_the_demo_model_needs_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "installed_device", lambda: None)
    assert "callboard[cpu]" in refusal("demo") or "Metal" in refusal("demo")
