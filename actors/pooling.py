"""`Pooling`: how a model's last hidden states become the vector of a text, as the model's files say.

Read by the streamer at its start. The files are those of sentence-transformers: `modules.json`, and the `config.json`
in the folder of its pooling module.
"""

from pathlib import Path
from typing import Any

import msgspec

from actors.model_files import read_json
from protocol.messages import Pool

_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}


class _Module(msgspec.Struct):
    path: str = ""
    type: str = ""


def read_pooling(folder: Path) -> Pool:
    """The pooling of the model in `folder`; the last token, normalized, when its files say nothing.

    Raises ValueError when they ask for one that isn't known.
    """
    try:
        modules = msgspec.json.decode((folder / "modules.json").read_bytes(), type=list[_Module])
    except FileNotFoundError:
        return Pool("last")
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{folder / 'modules.json'} can't be read ({error}); download the model again") from None
    mode = "last"
    for module in modules:
        if module.type.endswith("Pooling"):
            mode = _mode(folder, read_json(folder / module.path / "config.json"))
    return Pool(mode, normalize=any(module.type.endswith("Normalize") for module in modules))


def _mode(folder: Path, config: dict[str, Any]) -> str:
    asked = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    if len(asked) != 1 or asked[0] not in _MODES:
        wanted = ", ".join(asked) or "nothing"
        raise ValueError(f"the pooling of {folder} is {wanted}; known are {', '.join(_MODES)}")
    return _MODES[asked[0]]
