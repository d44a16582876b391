"""Callboard's wire protocol and its Python client.

from protocol import Client

with Client() as client:
    for delta in client.generate("The capital of France is", max_tokens=20):
        print(delta.text, end="")
"""

from protocol.client.aio import AsyncClient, AsyncStream
from protocol.client.requests import Delta
from protocol.client.results import Result, StreamStats
from protocol.client.sync import Client, Stream

__all__ = ["AsyncClient", "AsyncStream", "Client", "Delta", "Result", "Stream", "StreamStats"]
