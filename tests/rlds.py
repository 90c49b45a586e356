"""RLDS shards for the tests, written with protobuf's own library and a checksum of their own."""

import struct
from pathlib import Path

import numpy as np
from datasets import gradient
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from sharder.data.lerobot.write import encode_png

REPEATED, OPTIONAL = 3, 1
STRING, BYTES, FLOAT, INT64, MESSAGE = 9, 12, 2, 3, 11


def example_class():
    """tf.train.Example, declared here."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def message(name: str, *fields: tuple, parent=None):
        found = (parent.nested_type if parent is not None else file.message_type).add(name=name)
        for number, (field, kind, label, of) in enumerate(fields, 1):
            found.field.add(name=field, number=number, type=kind, label=label, type_name=of)
        return found

    message("BytesList", ("value", BYTES, REPEATED, None))
    message("FloatList", ("value", FLOAT, REPEATED, None))
    message("Int64List", ("value", INT64, REPEATED, None))
    kinds = [(f"{k}_list", MESSAGE, OPTIONAL, f".t.{k.capitalize()}List") for k in ("bytes", "float", "int64")]
    message("Feature", *kinds)
    features = message("Features", ("feature", MESSAGE, REPEATED, ".t.Features.FeatureEntry"))
    entry = message(
        "FeatureEntry", ("key", STRING, OPTIONAL, None), ("value", MESSAGE, OPTIONAL, ".t.Feature"), parent=features
    )
    entry.options.map_entry = True
    message("Example", ("features", MESSAGE, OPTIONAL, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


EXAMPLE = example_class()


def serialise(features: dict) -> bytes:
    """Lists of bytes, float32 arrays and integer arrays by name."""
    example = EXAMPLE()
    for name, values in features.items():
        feature = example.features.feature[name]
        if isinstance(values, list):
            feature.bytes_list.value.extend(values)
        elif np.issubdtype(values.dtype, np.floating):
            feature.float_list.value.extend(values.reshape(-1).tolist())
        else:
            feature.int64_list.value.extend(values.reshape(-1).tolist())
    return example.SerializeToString()


def crc32c(data: bytes) -> int:
    """Bit by bit, from the definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def make_rlds(folder: Path, lengths=(9, 14, 11, 6, 12), num_shards: int = 2, seed: int = 0) -> tuple[dict, np.ndarray]:
    """Writes a dataset; returns its columns and pictures, all episodes in a row."""
    rng, place = np.random.default_rng(seed), folder / "1.0.0"
    place.mkdir(parents=True)
    shards = np.array_split(np.arange(len(lengths)), num_shards)
    columns, pictures = {"action": [], "observation/state": []}, []
    for shard, episodes in enumerate(shards):
        with (place / f"demo-train.tfrecord-{shard:05d}-of-{num_shards:05d}").open("wb") as file:
            for e in episodes.tolist():
                length = lengths[e]
                numbers = {
                    n: rng.standard_normal((length, size)).astype(np.float32)
                    for n, size in (("action", 2), ("observation/state", 3))
                }
                seen = gradient(length, 24, 40, e)
                features = {f"steps/{n}": v for n, v in numbers.items()}
                features["steps/observation/image"] = [encode_png(p) for p in seen]
                features["steps/language_instruction"] = [f"do task {e % 2}".encode()] * length
                features["steps/is_first"] = (np.arange(length) == 0).astype(np.int64)
                features["steps/is_last"] = (np.arange(length) == length - 1).astype(np.int64)
                features["steps/reward"] = np.full(length, 300 * e - 5, np.int64)
                features["episode_metadata/file_path"] = [b"somewhere"]
                data = serialise(features)
                head = struct.pack("<Q", len(data))
                # The checksum of a message is not compared; its own bytes stand for it, to keep this fast.
                file.write(head + masked(head) + data + masked(data[:64]))
                for name, values in numbers.items():
                    columns[name].append(values)
                pictures.append(seen)
    return {n: np.concatenate(parts) for n, parts in columns.items()}, np.concatenate(pictures)
