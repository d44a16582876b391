"""Download of a model from the Hugging Face hub into the hub's own cache.

Called by the CLI's process on its main thread. Files are only stored: no code that comes with a model is
imported or run.
"""

import os
from pathlib import Path

from server.models.errors import ModelError

# The files that `mlx_lm.load` takes, so that both share one complete snapshot in the cache.
ALLOW_PATTERNS = [
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]


def fetch_from_hub(repo: str, *, progress: bool = True) -> Path:
    """The snapshot folder of the hub model `repo` ("org/name"), downloaded as far as it isn't cached.

    Without a connection the cached snapshot is taken. Raises ModelError.
    """
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    try:
        return Path(snapshot_download(repo, allow_patterns=ALLOW_PATTERNS))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"The hub model {repo} is gated: accept its terms on its page, then log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no folder {repo!r} here, and the hub has no model of that name that you may read. "
            "Check the spelling; for a private model log in with `hf auth login`."
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{repo!r} can't be the name of a hub model: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"{_why_offline()}, and the hub's cache on this machine doesn't hold {repo}. "
            "Connect once to download it, or give a model folder."
        ) from error
    # The download library lets errors of its HTTP and storage layers through, whatever their classes.
    except Exception as error:
        raise ModelError(f"The hub model {repo} could not be downloaded: {error}") from error


def _why_offline() -> str:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    return "The hub can't be reached"
