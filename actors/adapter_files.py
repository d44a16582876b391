"""What a LoRA adapter's folder holds: which layers it changes, of what rank, and where its matrices lie in the file.

Two kinds of folders are known: mlx-lm's (`adapter_config.json`, `adapters.safetensors`) and PEFT's
(`adapter_config.json`, `adapter_model.safetensors`). Read by the CLI, so that a bad folder is refused before anything
starts, and by the engine, whose side thread reads the matrices. Loads no MLX.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

CONFIG = "adapter_config.json"
MLX_WEIGHTS = "adapters.safetensors"
PEFT_WEIGHTS = "adapter_model.safetensors"

# numpy has no bfloat16
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_MAX_HEADER = 100 << 20  # bytes; the same limit as safetensors has
_PEFT_PREFIX = "base_model.model."
_FUSE = "make one model of it and its base with `mlx_lm.fuse`, and serve that"


class Tensor(msgspec.Struct, frozen=True):
    """A matrix in the file: its safetensors dtype, its shape, and where its bytes begin."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


class LowRank(msgspec.Struct, frozen=True):
    """What an adapter adds to one linear layer: scale × (x A) B, with A (inputs, rank) and B (rank, outputs).

    `transposed`: the file holds both the other way round, as PEFT does.
    """

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool

    @property
    def rank(self) -> int:
        """Columns of A and rows of B."""
        return self.a.shape[0] if self.transposed else self.a.shape[1]

    @property
    def inputs(self) -> int:
        """Inputs of the layer."""
        return self.a.shape[1] if self.transposed else self.a.shape[0]

    @property
    def outputs(self) -> int:
        """Outputs of the layer."""
        return self.b.shape[0] if self.transposed else self.b.shape[1]


class Matrices(msgspec.Struct, frozen=True):
    """The matrices of one layer, read: A as (rank, inputs), B as (rank, outputs), neither scaled.

    bfloat16 comes as its bits, in uint16.
    """

    a: npt.NDArray[Any]
    b: npt.NDArray[Any]
    dtype: str
    scale: float


class Contents(msgspec.Struct, frozen=True):
    """What was read of an adapter: its matrices by module, and a hash of all that makes it what it is."""

    layers: dict[str, Matrices]
    digest: str


class AdapterFiles(msgspec.Struct, frozen=True):
    """One adapter, by the name of the module that each of its parts changes. `header` is how its file begins."""

    name: str
    folder: Path
    weights: Path
    layers: dict[str, LowRank]
    header: bytes

    @property
    def dtypes(self) -> set[str]:
        """The safetensors dtypes of its matrices."""
        return {tensor.dtype for part in self.layers.values() for tensor in (part.a, part.b)}

    def read(self) -> Contents:
        """Raises OSError, and ValueError for a file that has another shape than before or holds no numbers."""
        data = self.weights.read_bytes()
        if not data.startswith(self.header):
            raise ValueError(f"{self.weights} has another shape than it had when the server started")
        scales = repr([(module, part.scale) for module, part in self.layers.items()])
        digest = hashlib.sha256(data + scales.encode()).hexdigest()
        return Contents({module: self._matrices(data, module, part) for module, part in self.layers.items()}, digest)

    def _matrices(self, data: bytes, module: str, part: LowRank) -> Matrices:
        a, b = _array(data, part.a), _array(data, part.b)
        for array, tensor in ((a, part.a), (b, part.b)):
            if not _finite(array, tensor.dtype):
                raise ValueError(f"{self.weights} holds infinities or NaNs for {module}")
        a, b = (a, b.T) if part.transposed else (a.T, b)
        return Matrices(np.ascontiguousarray(a), np.ascontiguousarray(b), part.a.dtype, part.scale)


def parse_adapter(text: str) -> tuple[str, Path]:
    """Name and folder of what `--adapter-path` was given: `NAME=PATH`, or a path whose last part is the name.

    Raises ValueError.
    """
    name, separator, path = text.partition("=")
    if not separator or "/" in name:
        path = text
        name = Path(text).expanduser().resolve().name
    if not name or not path:
        raise ValueError(f"{text!r} names no adapter; write NAME=PATH, or PATH")
    return name, Path(path).expanduser().absolute()


def read_adapter(name: str, folder: Path) -> AdapterFiles:
    """The adapter in `folder`. Raises ValueError, saying what to do instead, when it isn't one that can be served."""
    config_path = folder / CONFIG
    if not folder.is_dir():
        raise ValueError(f"the adapter {name!r} can't be read: there is no folder {folder}")
    try:
        config = json.loads(config_path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no adapter: it has no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{config_path} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{config_path} must hold a JSON object")
    peft = "peft_type" in config
    weights = folder / (PEFT_WEIGHTS if peft else MLX_WEIGHTS)
    if fault := _peft_fault(config) if peft else _mlx_fault(config):
        raise ValueError(f"the adapter {name!r} in {folder} can't be served: {fault}")
    if not weights.is_file():
        raise ValueError(f"{folder} holds no adapter: it has no {weights.name}")
    try:
        header = _header(weights)
        tensors = _tensors(header, weights)
    except OSError as error:
        raise ValueError(f"{weights} can't be read: {error}") from None
    layers = _peft_layers(config, tensors, weights) if peft else _mlx_layers(config, tensors, weights)
    if not layers:
        raise ValueError(f"{weights} holds no LoRA matrices")
    return AdapterFiles(name, folder, weights, layers, header)


def _mlx_fault(config: Mapping[str, Any]) -> str:
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        return f"it is a full fine-tune, which changes all weights; {_FUSE}"
    if kind == "dora":
        return f"it is a DoRA, which rescales the base's own weights; {_FUSE}, or train with --fine-tune-type lora"
    if kind != "lora":
        return f"its fine_tune_type is {kind!r}, not lora"
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict) or not _is_number(parameters.get("scale")):
        return f"its {CONFIG} has no number lora_parameters.scale"
    return ""


def _peft_fault(config: Mapping[str, Any]) -> str:
    if config["peft_type"] != "LORA":
        return f"its peft_type is {config['peft_type']!r}, not LORA"
    if config.get("use_dora"):
        return "it is a DoRA, which rescales the base's own weights; merge it into its base (merge_and_unload)"
    if config.get("bias", "none") != "none":
        return "it changes biases; merge it into its base (merge_and_unload)"
    if config.get("modules_to_save"):
        return "it replaces whole modules (modules_to_save); merge it into its base (merge_and_unload)"
    if not (_is_number(config.get("r")) and _is_number(config.get("lora_alpha"))):
        return f"its {CONFIG} has no numbers r and lora_alpha"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mlx_layers(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> dict[str, LowRank]:
    scale = float(config["lora_parameters"]["scale"])
    return _pairs(tensors, path, (".lora_a", ".lora_b"), lambda module, rank: scale, transposed=False)


def _peft_layers(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> dict[str, LowRank]:
    patterns = config.get("alpha_pattern") or {}

    def scale(module: str, rank: int) -> float:
        special = (alpha for key, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module))
        alpha = float(next(special, config["lora_alpha"]))
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    named = {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    return _pairs(named, path, (".lora_A.weight", ".lora_B.weight"), scale, transposed=True)


def _pairs(
    tensors: Mapping[str, Tensor],
    path: Path,
    ends: tuple[str, str],
    scale: Callable[[str, int], float],
    *,
    transposed: bool,
) -> dict[str, LowRank]:
    layers: dict[str, LowRank] = {}
    left = set(tensors)
    for name in sorted(tensors):
        if not name.endswith(ends[0]):
            continue
        module = name.removesuffix(ends[0])
        other = module + ends[1]
        if other not in tensors:
            raise ValueError(f"{path} has {name}, but not {other}")
        part = LowRank(tensors[name], tensors[other], 1.0, transposed)
        shapes = f"{tensors[name].shape} and {tensors[other].shape}"
        if len(part.a.shape) == 3:
            raise ValueError(
                f"{path} changes the experts of a mixture ({module}), which can't be chosen per request; {_FUSE}"
            )
        if len(part.a.shape) != 2 or len(part.b.shape) != 2 or part.a.dtype != part.b.dtype:
            raise ValueError(f"the matrices of {module} in {path} are {shapes}: they make no LoRA")
        if part.rank != (part.b.shape[1] if transposed else part.b.shape[0]) or not part.rank:
            raise ValueError(f"the matrices of {module} in {path} are {shapes}: they have no rank in common")
        layers[module] = msgspec.structs.replace(part, scale=scale(module, part.rank))
        left -= {name, other}
    if left:
        first = sorted(left)[0]
        raise ValueError(f"{path} holds {first}, which is no part of a LoRA of linear layers; {_FUSE}")
    return layers


def _header(path: Path) -> bytes:
    """The file's first bytes, up to its data."""
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        header = start + file.read(min(length, _MAX_HEADER))
    if not length or len(header) != 8 + length:
        raise ValueError(f"{path} is no safetensors file: its header is cut off; copy it again")
    return header


def _tensors(header: bytes, path: Path) -> dict[str, Tensor]:
    damaged = f"{path} is damaged: {{}}; copy it again"
    try:
        entries = json.loads(header[8:])
        entries.pop("__metadata__", None)
        read = {
            name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]) for name, entry in entries.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(damaged.format(f"its header can't be read ({error})")) from None
    size = path.stat().st_size
    tensors = {}
    for name, (dtype, shape, begin, end) in read.items():
        if dtype not in _DTYPES:
            raise ValueError(f"{path} holds {name} as {dtype}; only F32, F16 and BF16 are served")
        if end - begin != math.prod(shape) * _DTYPES[dtype].itemsize or len(header) + end > size:
            raise ValueError(damaged.format(f"{name} is cut off"))
        tensors[name] = Tensor(dtype, shape, len(header) + begin)
    return tensors


def _array(data: bytes, tensor: Tensor) -> npt.NDArray[Any]:
    dtype = _DTYPES[tensor.dtype]
    flat: npt.NDArray[Any] = np.frombuffer(data, dtype, math.prod(tensor.shape), tensor.begin)
    return flat.reshape(tensor.shape)


def _finite(array: npt.NDArray[Any], dtype: str) -> bool:
    if dtype == "BF16":
        return bool(np.all(array & np.uint16(0x7F80) != 0x7F80))
    return bool(np.isfinite(array).all())
