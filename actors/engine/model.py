"""`Model`: the one module that wraps mlx-lm. Loads a model's weights, runs its forward pass, makes its caches.

Used by the engine process alone, on its one thread. The tokenizer is not loaded here.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import structlog

from actors.engine.memory import available_for_weights
from actors.model_files import ModelFiles, read_model_files


@contextmanager
def _file_limit_kept() -> Iterator[None]:
    # mlx_lm.utils sets the limit of open files to (2048, 4096) when it is imported. That can't be undone
    # afterwards: an ordinary user can't raise the hard limit again.
    original = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = original


with _file_limit_kept():
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
    from mlx_lm.utils import load_model

log = structlog.get_logger()

Cache = Any  # one of mlx-lm's cache classes; what the batch asks of them is listed in `_unbatchable`
_BATCH_INTERFACE = ("prepare", "finalize", "extend", "filter", "state")


class ModelError(Exception):
    """A model can't be served; the text is for the user."""


class Model:
    """A loaded model. `context` and `vocab_size` are in tokens."""

    def __init__(self, network: Any, files: ModelFiles, max_kv_size: int | None = None) -> None:
        self.files = files
        self.context = files.context
        self.vocab_size = files.vocab_size
        self.eos_token_ids = frozenset(files.eos_token_ids)
        self._network = network
        self._max_kv_size = max_kv_size

    def forward(self, ids: mx.array, caches: list[Cache]) -> mx.array:
        """Logits (rows, tokens, vocabulary) of `ids` (rows, tokens); `caches` take up the new keys and values."""
        logits: mx.array = self._network(ids, cache=caches)
        return logits

    def new_caches(self) -> list[Cache]:
        """Empty caches for one row, one per layer that has one.

        With `max_kv_size` plain caches become windows of that size. They keep no first tokens: mlx-lm loses
        kept ones silently as soon as rows are batched.
        """
        caches: list[Cache] = make_prompt_cache(self._network)
        if self._max_kv_size is None:
            return caches
        return [self._window() if type(cache) is KVCache else cache for cache in caches]

    def _window(self) -> Cache:
        return RotatingKVCache(max_size=self._max_kv_size, keep=0)  # type: ignore[no-untyped-call]  # mlx-lm's


def start_eval(arrays: Any) -> None:
    """Have the device compute these arrays (a tree of them) without waiting for it."""
    mx.async_eval(arrays)  # type: ignore[no-untyped-call]  # MLX's stub leaves it bare


def load(path: str | Path, max_kv_size: int | None = None, trust_remote_code: bool = False) -> Model:
    """Load the model in folder `path` and try it.

    Raises ModelError, with a text for the user, when files are missing or damaged, the architecture or a kind
    of cache isn't supported, or memory is too small.
    """
    path = Path(path)
    try:
        files = read_model_files(path)
    except (OSError, ValueError) as error:
        raise ModelError(str(error)) from error
    _check_memory(path)
    network = _load_network(path, files, trust_remote_code)
    model = Model(network, files, max_kv_size)
    _check_caches(model, max_kv_size)
    width = _try_out(model)
    if not model.vocab_size:
        model.vocab_size = width
    return model


def _check_memory(path: Path) -> None:
    weights = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    available = available_for_weights()
    if weights > available:
        raise ModelError(
            f"not enough memory for {path}: its weights take {_size(weights)}, "
            f"{_size(available)} are free; take a smaller or a quantized model"
        )


def _load_network(path: Path, files: ModelFiles, trust_remote_code: bool) -> Any:
    architecture = f"{files.model_type} (mlx-lm {version('mlx-lm')})"
    try:
        network, _ = load_model(path, trust_remote_code=trust_remote_code)
    except FileNotFoundError as error:
        raise ModelError(f"{path} holds no weights (model*.safetensors)") from error
    except MemoryError as error:
        raise ModelError(f"not enough memory to load {path}") from error
    except ValueError as error:
        if "not supported" in str(error):
            raise ModelError(f"the architecture {architecture} is not supported: {error}") from error
        raise ModelError(f"{path} can't be loaded as {architecture}: {error}") from error
    except Exception as error:
        # Whatever a config with unexpected values or a damaged weight file leads to inside mlx-lm.
        raise ModelError(f"{path} can't be loaded as {architecture}: {type(error).__name__}: {error}") from error
    return network


def _check_caches(model: Model, max_kv_size: int | None) -> None:
    caches = model.new_caches()
    kinds = sorted({kind for cache in caches for kind in _unbatchable(cache)})
    if kinds:
        raise ModelError(
            f"{model.files.model_type} uses a kind of cache that can't be batched yet: {', '.join(kinds)}"
        )
    if max_kv_size is not None and not any(isinstance(cache, RotatingKVCache) for cache in caches):
        names = sorted({type(cache).__name__ for cache in caches})
        raise ModelError(f"max_kv_size doesn't apply to the caches of {model.files.model_type}: {', '.join(names)}")


def _unbatchable(cache: Cache) -> list[str]:
    """Names of the kinds in `cache` that can't be merged into a batch or taken out of it."""
    if (parts := getattr(cache, "caches", None)) is not None:
        return [kind for part in parts for kind in _unbatchable(part)]
    name = type(cache).__name__
    if not hasattr(cache, "merge"):
        return [name]
    merged = type(cache).merge([cache])
    return [] if all(hasattr(merged, needed) for needed in _BATCH_INTERFACE) else [name]


def _try_out(model: Model) -> int:
    """One small prefill and a decode step, so that what can't work on this device fails at start.

    Returns the width of the logits.
    """
    try:
        caches = model.new_caches()
        logits = model.forward(mx.zeros((1, 2), mx.uint32), caches)
        logits = model.forward(mx.argmax(logits[:, -1:], axis=-1), caches)
        mx.eval(logits)
    except Exception as error:
        raise ModelError(f"{model.files.path} loads, but a first step fails: {error}") from error
    return logits.shape[-1]


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
