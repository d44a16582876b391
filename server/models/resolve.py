"""From what the user calls a model to the folder that holds it.

Called by the CLI's process on its main thread, before any actor starts.
"""

import json
import re
from pathlib import Path

from server.models.demo import demo_model
from server.models.device import installed_device, missing_backend_hint
from server.models.errors import ModelError
from server.models.hub import fetch_from_hub

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
    "tiktoken.model",
)
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.npz")
_LFS_POINTER = b"version https://git-lfs"


def resolve_model(spec: str, *, device: str | None = None, progress: bool = True) -> Path:
    """The absolute folder of the model `spec`: a local folder, a hub id `org/name`, or `demo`.

    What isn't on this machine yet is fetched, with progress on standard error if `progress`. `device`
    ("metal", "cuda" or "cpu"; None: the installed backend) chooses the weights of the demo model.
    Raises ModelError.
    """
    if spec == DEMO:
        device = device or installed_device()
        if device is None:
            raise ModelError(missing_backend_hint())
        return demo_model(device, progress=progress)
    path = Path(spec).expanduser()
    if spec and path.exists():
        return check_folder(path.absolute(), spec)
    if _HUB_ID.fullmatch(spec):
        return check_folder(fetch_from_hub(spec, progress=progress), spec)
    raise ModelError(f"There is no folder {spec!r}. Give a model folder, a hub id such as org/name, or `{DEMO}`.")


def check_folder(folder: Path, spec: str) -> Path:
    """Return `folder`, or raise ModelError when it can't hold a model; `spec` is what the user called it."""
    if not folder.is_dir():
        raise ModelError(
            f"{spec} is a file. Give the folder of a model in MLX or Hugging Face form "
            "(config.json, model*.safetensors, tokenizer files)."
        )
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{spec} is not a model folder: it has no config.json.")
    try:
        model_type = json.loads(config.read_bytes())["model_type"]
    except (ValueError, KeyError, TypeError, OSError):
        model_type = None
    if not isinstance(model_type, str):
        raise ModelError(f"{spec}/config.json names no model_type, so it can't be told which model it is.")
    _check_weights(folder, spec)
    if not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        raise ModelError(
            f"{spec} has no tokenizer (tokenizer.json or tokenizer.model): "
            "copy the tokenizer files of the original model there."
        )
    return folder


def _check_weights(folder: Path, spec: str) -> None:
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        other = sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern))
        found = f" It has {other[0]}: convert it with `mlx_lm.convert` first." if other else ""
        raise ModelError(f"{spec} has no weights (model*.safetensors).{found}")
    missing = _missing_shards(folder)
    if missing:
        raise ModelError(f"{spec} lacks {len(missing)} of its weight files, the first is {missing[0]}.")
    for path in weights:
        with open(path, "rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ModelError(f"{spec}/{path.name} is a Git LFS pointer, not weights: run `git lfs pull` there.")


def _missing_shards(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []  # the index is optional: mlx-lm reads the files themselves
    return sorted(name for name in names if not (folder / name).is_file())
