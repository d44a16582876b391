"""Encode and decode messages: the one codec of the system (MessagePack by msgspec).

Used by every process on its own thread; encoders and decoders keep no state between calls.
"""

from typing import Any, Generic, TypeVar

import msgspec

from protocol import messages as m


class CodecError(ValueError):
    """A frame that is not a message of the expected kind. The text says what is wrong with it."""


_encoder = msgspec.msgpack.Encoder()


T = TypeVar("T")


class Codec(Generic[T]):
    """Decodes one family of messages, for example everything a client may send."""

    def __init__(self, family: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(family)

    def decode(self, frame: bytes | memoryview) -> T:
        """Decode one frame.

        Raises CodecError for anything but a well-formed message of the family.
        """
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise CodecError(str(error)) from None


def encode(message: Any) -> bytes:
    """Encode one message as a MessagePack array that starts with its tag.

    Raises CodecError when a text holds a lone surrogate or a value has no MessagePack form.
    """
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, TypeError, OverflowError, ValueError, RecursionError) as error:
        raise CodecError(f"the message can't be encoded: {error}") from None


client_codec: Codec[m.ClientMessage] = Codec(m.ClientMessage)
server_codec: Codec[m.ServerMessage] = Codec(m.ServerMessage)
job_codec: Codec[m.TokenizerJob] = Codec(m.TokenizerJob)
result_codec: Codec[m.TokenizerResult] = Codec(m.TokenizerResult)
command_codec: Codec[m.EngineCommand] = Codec(m.EngineCommand)
step_codec: Codec[m.Step] = Codec(m.Step)
report_codec: Codec[m.ActorReport] = Codec(m.ActorReport)
order_codec: Codec[m.SupervisorOrder] = Codec(m.SupervisorOrder)
model_order_codec: Codec[m.ModelOrder] = Codec(m.ModelOrder)
model_answer_codec: Codec[m.ModelAnswer] = Codec(m.ModelAnswer)
