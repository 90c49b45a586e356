"""TFRecord files and the tf.train.Example messages in them, by their bytes.

A record is its length (uint64), a checksum of that, the message, a checksum of it (tensorflow/core/lib/io/record_writer.h). An
Example is a map from names to lists of bytes, floats or integers (tensorflow/core/example/example.proto), in protobuf's wire format.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sharder.config import UserError

POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
MASK_DELTA = 0xA282EAD8  # TFRecord's masking: rotated by 15 bits, then this is added


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


TABLE = _table()


def masked_crc(data: bytes) -> int:
    """TFRecord's checksum; byte by byte, so for short data only."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + MASK_DELTA) & 0xFFFFFFFF


@dataclass(frozen=True)
class Record:
    start: int
    """Of the message in its file, in bytes."""
    data: bytes
    crc: int
    """The stored checksum of the message."""


def read_records(path: Path) -> Iterator[Record]:
    """All records of a file. Raises UserError where a length is damaged, or the file ends in the middle of a record.

    The checksum of lengths is compared; that of a message is only handed out.
    """
    with path.open("rb") as file:
        number = 0
        while True:
            start = file.tell()
            head = file.read(12)
            if not head:
                return
            if len(head) < 12:
                raise UserError(f"{path} is truncated: record {number}, at byte {start}, has no whole header.")
            length, crc = struct.unpack("<QI", head)
            if crc != masked_crc(head[:8]):
                raise UserError(
                    f"{path}, record {number}, at byte {start}: the checksum of its length is wrong. The file is damaged."
                )
            data, tail = file.read(length), file.read(4)
            if len(tail) < 4:
                raise UserError(f"{path} is truncated: record {number}, at byte {start}, should have {length} bytes.")
            yield Record(start + 12, data, struct.unpack("<I", tail)[0])
            number += 1


Values = np.ndarray
"""Of a feature: float32 or int64 (n,), or for bytes int64 (n, 2), begin and size of each in the message."""


def parse_example(data: bytes) -> dict[str, Values]:
    """The features of a serialised tf.train.Example. Raises ValueError where it is none."""
    found = {}
    for _, begin, end in _fields(data, 0, len(data), 1):
        for _, entry_begin, entry_end in _fields(data, begin, end, 1):
            name, feature = None, None
            for number, b, e in _fields(data, entry_begin, entry_end, None):
                if number == 1:
                    name = data[b:e].decode()
                elif number == 2:
                    feature = _parse_feature(data, b, e)
            if name is not None and feature is not None:
                found[name] = feature
    return found


def _parse_feature(data: bytes, begin: int, end: int) -> Values | None:
    for kind, b, e in _fields(data, begin, end, None):
        if kind == 1:
            return np.array([(s, t - s) for _, s, t in _fields(data, b, e, 1)], np.int64).reshape(-1, 2)
        parts = [(s, t) for _, s, t in _fields(data, b, e, 1)]
        raw = b"".join(data[s:t] for s, t in parts)  # one packed list, or values one by one
        if kind == 2:
            return np.frombuffer(raw, "<f4")
        if kind == 3:
            return _varints(raw)
    return None


def _varints(raw: bytes) -> np.ndarray:
    """int64 from varints one after the other: seven bits a byte, the lowest first, the top bit set on all but the last byte."""
    x = np.frombuffer(raw, np.uint8)
    last = np.flatnonzero(x < 128)
    if not last.size:
        return np.zeros(0, np.int64)
    first = np.concatenate([[0], last[:-1] + 1])
    place = np.arange(last[-1] + 1) - np.repeat(first, last - first + 1)
    parts = (x[: last[-1] + 1] & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.add.reduceat(parts, first).view(np.int64)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _fields(data: bytes, at: int, end: int, wanted: int | None) -> Iterator[tuple[int, int, int]]:
    """(number, begin, end) of the fields of a message, of that number only unless None."""
    try:
        while at < end:
            key, at = _varint(data, at)
            begin = at
            if key & 7 == 2:
                size, begin = _varint(data, at)
                at = begin + size
            elif key & 7 == 0:
                _, at = _varint(data, at)
            elif key & 7 in (1, 5):
                at += 8 if key & 7 == 1 else 4
            else:
                raise ValueError(f"wire type {key & 7} at byte {begin}")
            if at > end:
                raise ValueError(f"a field reaches past its message at byte {begin}")
            if wanted is None or key >> 3 == wanted:
                yield key >> 3, begin, at
    except IndexError:
        raise ValueError("the message ends in the middle of a field") from None
