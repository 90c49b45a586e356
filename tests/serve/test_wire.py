"""The encoding of openpi's protocol: bytes written by hand, what comes back, and what is no request."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharder.config import UserError
from sharder.serve.wire import pack, unpack

# {"x": {b"__ndarray__": True, b"data": two float32, b"dtype": "<f4", b"shape": [2]}}, byte by byte from the specification of msgpack.
BY_HAND = (
    b"\x81\xa1x\x84" + b"\xc4\x0b__ndarray__\xc3" + b"\xc4\x04data\xc4\x08\x00\x00\x80\x3f\x00\x00\x00\xc0" + b"\xc4\x05dtype\xa3<f4"
    + b"\xc4\x05shape\x91\x02"
)  # fmt: skip


def array(**changed):
    return {
        "deep": {
            "x": {b"__ndarray__": True, b"data": bytes(8), b"dtype": "<f4", b"shape": [2]}
            | {k.encode(): v for k, v in changed.items()}
        }
    }


def test_bytes_written_by_hand_are_an_array_both_ways():
    found = unpack(BY_HAND)["x"]
    assert found.dtype == np.float32 and found.tolist() == [1.0, -2.0]
    assert pack({"x": np.array([1.0, -2.0], np.float32)}) == BY_HAND


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "<i8", ">f4", "f8", "f2", "U3"])
def test_arrays_and_scalars_of_every_kind_come_back(dtype):
    x = np.array([[0, 1, 2]]).astype(dtype)
    found = unpack(pack({"a": x, "b": {"c": x[0, 1]}, "d": [1, "text", None, 2.5]}))
    assert found["a"].dtype == x.dtype and np.array_equal(found["a"], x)
    assert found["b"]["c"] == x[0, 1] and found["d"] == [1, "text", None, 2.5]


def test_an_array_without_elements_comes_back():
    assert unpack(pack({"a": np.zeros((0, 3))}))["a"].shape == (0, 3)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"data": bytes(7)}, "deep/x is an array of dtype <f4 and shape (2,), but its data is 7 bytes"),
        ({"data": "text"}, "deep/x .* its data is str"),
        ({"shape": [-2]}, "deep/x is an array of shape [-2]"),
        ({"shape": [2**40, 2**40]}, "deep/x .* its data is 8 bytes"),
        ({"shape": None}, "deep/x is an array of shape None"),
        ({"dtype": "O"}, "deep/x is an array of dtype 'O'"),
        ({"dtype": "i4,f8"}, "deep/x is an array of dtype"),
        ({"dtype": "<f3"}, "deep/x is no <f3"),
        ({"dtype": 7}, "deep/x is an array of dtype 7"),
    ],
    ids=str,
)
def test_a_wrong_array_is_named(changed, message):
    with pytest.raises(
        UserError, match=message.replace("(", r"\(").replace(")", r"\)").replace("[", r"\[").replace("]", r"\]")
    ):
        unpack(pack(array(**changed)))


@pytest.mark.parametrize(
    "message, error",
    [("text", "text frame"), (b"", "no msgpack"), (b"\xc1", "no msgpack"), (b"\x93\x01\x02\x03", "is a list"), (b"\x81\x01\x02", "no msgpack"),
     (b"\x81\xa1x" + b"\x91" * 40 + b"\xc0", "lists and maps deep"), (b"\x91" * 5000, "no msgpack"), (b"\xdd\xff\xff\xff\xff", "no msgpack"),
     (BY_HAND + b"x", "no msgpack")],
)  # fmt: skip
def test_what_is_no_request_is_said(message, error):
    with pytest.raises(UserError, match=error):
        unpack(message)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_map_or_an_error(message):
    try:
        assert isinstance(unpack(message), dict)
    except UserError:
        pass


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(TypeError, match="set cannot be sent"):
        pack({"a": {1}})
