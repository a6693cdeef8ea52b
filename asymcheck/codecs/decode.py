"""Decoding: the plain bytes of a frame's payload."""

from __future__ import annotations

from asymcheck.errors import UnsupportedCodecError
from asymcheck.format.frame import FrameDescriptor
from asymcheck.format.registry import CODEC_IDENTITY, CODECS


def decode(descriptor: FrameDescriptor, payload: memoryview) -> memoryview:
    """Return the plain bytes of a payload; for codec identity that is the payload itself, without a copy.

    Raises:
        UnsupportedCodecError: the codec is not known.
    """
    if descriptor.codec == CODEC_IDENTITY:
        return payload
    name = CODECS.get(descriptor.codec, "unknown")
    raise UnsupportedCodecError(f"codec {descriptor.codec} ({name}) is not supported: install a newer asymcheck")
