"""API keys: what is known of each, and the file they are read from (`--api-key-file`). Read by the CLI.

[alice]
key = "…"                      # or sha256 = "…", so that the file doesn't hold the key itself
requests_per_minute = 60
tokens_per_day = 1000000       # prompt and answer
admin = true                   # may use the dashboard and /metrics
"""

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

from msgspec import Struct

from protocol.messages import Quota

_SPANS = {"minute": 60.0, "hour": 3600.0, "day": 86400.0}
_QUOTA = re.compile(r"(requests|tokens)_per_(minute|hour|day)")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class KeyFileError(ValueError):
    """The file can't be used; the text says where and why."""


class ApiKey(Struct, frozen=True):
    """One key. `digest` is the SHA-256 of its text, in hex. Without `admin` it opens the APIs alone."""

    name: str
    digest: str
    quotas: list[Quota] = []
    admin: bool = False


def plain_key(key: str) -> ApiKey:
    """A key given without a name: it may do everything."""
    return ApiKey("", digest_of(key.encode()), admin=True)


def digest_of(key: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(key).hexdigest()


def read_key_file(path: Path) -> list[ApiKey]:
    """The keys of a file. Raises KeyFileError."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise KeyFileError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path} is not TOML: {error}") from None
    if not content:
        raise KeyFileError(f'{path} holds no key; write a table [NAME] with key = "…" for each')
    return [_key(name, entry, f"{path}: [{name}]") for name, entry in content.items()]


def _key(name: str, entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, dict):
        raise KeyFileError(f"{where} must be a table")
    given = dict(entry)
    text, digest, admin = given.pop("key", None), given.pop("sha256", None), given.pop("admin", False)
    if isinstance(text, str) and text and digest is None:
        digest = digest_of(text.encode())
    elif text is not None or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise KeyFileError(f"{where} needs either key, or sha256 with 64 hex digits")
    if not isinstance(admin, bool):
        raise KeyFileError(f"{where} admin must be true or false")
    quotas = []
    for option, amount in given.items():
        match = _QUOTA.fullmatch(option)
        if match is None:
            raise KeyFileError(f"{where} has no option {option!r}; there are requests_per_… and tokens_per_minute, …")
        if not isinstance(amount, int) or isinstance(amount, bool) or amount < 1:
            raise KeyFileError(f"{where} {option} must be a whole number above 0")
        quotas.append(Quota(match[1], amount, _SPANS[match[2]]))
    return ApiKey(name, digest, quotas, admin)
