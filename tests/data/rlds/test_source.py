import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlds import make_rlds, masked, serialise

from sharder.config import UserError
from sharder.data.frames import FrameReader
from sharder.data.rlds.records import masked_crc, parse_example
from sharder.data.rlds.source import find_shards, open_rlds


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rlds") / "demo"
    return folder, *make_rlds(folder)


def open_fresh(folder, tmp_path):
    return open_rlds(folder, str(tmp_path / "cache"))


@given(
    st.dictionaries(st.text(min_size=1, max_size=9), st.one_of(
        st.lists(st.binary(max_size=200), min_size=1, max_size=4),
        st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40).map(lambda x: np.array(x, np.float32)),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40).map(lambda x: np.array(x, np.int64)),
    ), max_size=5)
)  # fmt: skip
def test_examples_are_read_as_protobuf_wrote_them(features):
    data = serialise(features)
    found = parse_example(data)
    assert set(found) == set(features)
    for name, values in features.items():
        if isinstance(values, list):
            assert [data[b : b + n] for b, n in found[name].tolist()] == values
        else:
            assert np.array_equal(found[name], values) and found[name].dtype == values.dtype


@given(st.binary(max_size=40))
def test_the_checksum_is_that_of_its_definition(data):
    assert masked_crc(data).to_bytes(4, "little") == masked(data)


def test_the_checksum_of_the_standard_s_example():
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_numbers_and_prompts_are_those_that_were_written(made, tmp_path):
    folder, columns, _ = made
    source = open_fresh(folder, tmp_path)
    assert source.lengths.tolist() == [9, 14, 11, 6, 12]
    assert all(np.array_equal(source.columns[n], v) for n, v in columns.items())
    assert source.columns["reward"][[0, 9, 51], 0].tolist() == [-5, 295, 1195]
    assert source.prompts(np.array([0, 9, 23])) == ["do task 0", "do task 1", "do task 0"]


def test_pictures_are_found_in_any_order(made, tmp_path):
    folder, _, pictures = made
    source, reader = open_fresh(folder, tmp_path), FrameReader(cache_bytes=10 * 24 * 40 * 3)
    order = np.random.default_rng(0).integers(0, source.num_frames, 80)
    for places, wanted in source.pictures("observation/image", order):
        assert np.array_equal(reader.read(wanted), pictures[order[places]])


def test_the_index_is_built_once_and_anew_when_a_shard_changes(made, tmp_path, monkeypatch):
    import sharder.data.rlds.source as module

    folder, cache, built = tmp_path / "demo", tmp_path / "cache", []
    make_rlds(folder)
    build = module._build
    monkeypatch.setattr(module, "_build", lambda paths: built.append(paths) or build(paths))
    first, again = open_rlds(folder, str(cache)), open_rlds(folder, str(cache))
    assert len(built) == 1 and first.fingerprint == again.fingerprint
    assert all(np.array_equal(first.columns[n], again.columns[n]) for n in first.columns)
    shard = find_shards(folder)[1]
    shard.write_bytes(shard.read_bytes() + shard.read_bytes())
    assert open_rlds(folder, str(cache)).fingerprint != first.fingerprint and len(built) == 2


def cut(path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda p: cut(p[0], p[0].stat().st_size - 100), "demo-train.tfrecord-00000-of-00002 is truncated: record 2"),
        (lambda p: cut(p[1], 7), "demo-train.tfrecord-00001-of-00002 is truncated: record 0"),
        (lambda p: flip(p[0], 2), "demo-train.tfrecord-00000-of-00002, record 0, at byte 0: the checksum"),
        (lambda p: p[1].unlink(), "1 shards of split train, but their names say 00002"),
        (lambda p: [q.unlink() for q in p], "no .-train.tfrecord"),
    ],
)
def test_a_damaged_shard_is_one_message(tmp_path, damage, message):
    make_rlds(tmp_path / "demo")
    damage(find_shards(tmp_path / "demo"))
    with pytest.raises(UserError, match=message):
        open_fresh(tmp_path / "demo", tmp_path)
