"""What goes over the wire: msgpack, with arrays of numpy as maps, as openpi's client writes and reads them.

An array is {b"__ndarray__": True, b"data": bytes, b"dtype": text, b"shape": sizes}, a scalar of numpy
{b"__npgeneric__": True, b"data": value, b"dtype": text}.
"""

import math
import re

import msgpack
import numpy as np

from sharder.config import UserError

DTYPE = re.compile(r"[<>|=]?[?biufUS]\d{0,4}")
"""Booleans, numbers and text; never objects, structures or complex numbers."""
LARGEST_LIST, DEEPEST = 16384, 16
"""Elements of a list or map, and lists and maps in one another; arrays are for more."""


def pack(tree: object) -> bytes:
    """Maps, lists, text, numbers and arrays as one message."""
    return msgpack.packb(tree, default=_describe)


def _describe(value: object) -> dict:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} cannot be sent")


def unpack(message: bytes | str) -> dict:
    """A request. Raises UserError saying what is wrong with it, with the name of the field where there is one."""
    if isinstance(message, str):
        raise UserError("the request is a text frame, but must be a binary frame of msgpack.")
    limits = {"max_array_len": LARGEST_LIST, "max_map_len": LARGEST_LIST, "max_ext_len": 0}
    try:
        tree = msgpack.unpackb(message, **limits)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"the request is no msgpack: {str(error).rstrip('.') or 'it is malformed, or too deep'}.") from None
    if not isinstance(tree, dict) or b"__ndarray__" in tree:
        raise UserError(f"the request is a {type(tree).__name__}, but must be a map of fields.")
    return _with_arrays(tree, "", 0)


def _with_arrays(value: object, path: str, depth: int) -> object:
    """The tree with arrays in place of the maps that describe them; `path` names the field."""
    if depth > DEEPEST:
        raise UserError(f"{path} is more than {DEEPEST} lists and maps deep.")
    if isinstance(value, list):
        return [_with_arrays(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if b"__ndarray__" in value or b"__npgeneric__" in value:
        return _array(value, path)
    return {key: _with_arrays(item, f"{path}/{_text(key)}" if path else _text(key), depth + 1) for key, item in value.items()}


def _text(key: object) -> str:
    return key if isinstance(key, str) else repr(key)


def _array(value: dict, path: str) -> np.ndarray | np.generic:
    """Read-only; the data is not copied."""
    name, data = value.get(b"dtype"), value.get(b"data")
    if not isinstance(name, str) or not DTYPE.fullmatch(name):
        raise UserError(f"{path} is an array of dtype {name!r}, but only booleans, numbers and text are read.")
    try:
        dtype = np.dtype(name)
        if b"__npgeneric__" in value:
            return dtype.type(data)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{path} is no {name}.") from None
    shape = value.get(b"shape")
    if not isinstance(shape, list) or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
        raise UserError(f"{path} is an array of shape {shape!r}, but a shape is a list of sizes.")
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
        held = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise UserError(f"{path} is an array of dtype {name} and shape {tuple(shape)}, but its data is {held}.")
    if not data:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape)
