import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sharder import lock
from sharder.config import DataConfig, UserError
from sharder.data import token_files
from sharder.data.corpus import Corpus, open_corpus
from sharder.data.sources import Topic
from sharder.data.text import open_text
from sharder.data.token_files import encode_split
from sharder.data.tokenize import ByteTokenizer, open_tokenizer


def split_of(*contents: bytes):
    return Corpus("test", tuple(Topic(str(i), content) for i, content in enumerate(contents))).split("auto", 0.0)[0]


def documents_of(files) -> list[list[int]]:
    tokens, offsets = files.tokens(), files.offsets()
    return [tokens[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:])]


class Slow(ByteTokenizer):
    """Tells when it is asked first, and takes its time."""

    fingerprint = "slow"

    def __init__(self, begun: str, seconds: float):
        self.begun, self.seconds = begun, seconds

    def encode_batch(self, texts):
        with open(self.begun, "a") as file:
            file.write("x")
        time.sleep(self.seconds)
        return super().encode_batch(texts)


def start_encoding(tmp_path, seconds: float) -> subprocess.Popen:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_token_files import Slow, encode_split, split_of\n"
        "files = encode_split(split_of(b'one', b'two'), Slow(sys.argv[3], float(sys.argv[4])), sys.argv[2])\n"
        "print(files.tokens().tobytes().decode())"
    )
    command = [sys.executable, "-c", program, os.path.dirname(__file__), tmp_path / "cache", tmp_path / "begun", str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kind", ["json", "model"])
def test_files_hold_every_document_and_its_end(paths, kind, tmp_path):
    tokenizer = open_tokenizer(paths[kind])
    texts = ["one text", "and ünother\n"]
    files = encode_split(split_of(*[text.encode() for text in texts]), tokenizer, str(tmp_path))
    assert documents_of(files) == [[*tokenizer.encode(text), tokenizer.end_of_document] for text in texts]


def test_document_without_tokens_is_none(tmp_path):
    class Vowels(ByteTokenizer):
        def encode_batch(self, texts):
            return [ids[np.isin(ids, list(b"aeiou"))] for ids in super().encode_batch(texts)]

    files = encode_split(split_of(b"xyz", b"one", b"", b"q", b"two", b"z"), Vowels(), str(tmp_path))
    assert documents_of(files) == [list(b"oe"), list(b"o")]


def test_long_documents_are_encoded_in_chunks_without_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "CHUNK_BYTES", 16)
    monkeypatch.setattr(token_files, "BATCH_BYTES", 40)
    letters = random.Random(0).choices("ab \n\u00fc\u20ac\U0001f98a", k=2000)
    texts = ["".join(letters), "\U0001f98a" * 50, "short", "a" * 16, "b" * 17]
    files = encode_split(split_of(*[text.encode() for text in texts]), ByteTokenizer(), str(tmp_path))
    assert [bytes(ids).decode() for ids in documents_of(files)] == texts


def test_chunks_end_with_lines_and_are_bounded(monkeypatch):
    monkeypatch.setattr(token_files, "CHUNK_BYTES", 10)
    batches = list(token_files._batches(split_of(b"line one\nline 2\nthree four five\n").pieces()))
    assert [text for texts, _, _ in batches for text in texts] == ["line one\n", "line 2\n", "three", " four", " five\n"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "<u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_dtype_is_the_smallest_that_fits(tmp_path, vocab_size, dtype):
    class Sized(ByteTokenizer):
        def __init__(self):
            self.vocab_size = vocab_size

    assert encode_split(split_of(b"text"), Sized(), str(tmp_path)).tokens().dtype == np.dtype(dtype)


def test_files_are_found_again_without_encoding(tmp_path):
    encode = lambda: encode_split(split_of(b"text"), Slow(str(tmp_path / "begun"), 0), str(tmp_path / "cache"))  # noqa: E731
    assert encode() == encode() and (tmp_path / "begun").read_text() == "x"


def test_finding_files_of_parquet_decodes_nothing(tmp_path, json_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["some words"] * 40 + ["others"] * 9}), tmp_path / "x.parquet")
    data = DataConfig(path=str(tmp_path / "x.parquet"), tokenizer=json_path, token_cache=str(tmp_path / "cache"), seq_len=4)
    made, _ = open_text(data, 400)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", None)
    assert open_text(data, 400)[0].fingerprint == made.fingerprint


@pytest.mark.parametrize("change", ["content", "tokenizer", "side"])
def test_each_input_has_files_of_its_own(tmp_path, json_path, model_path, change):
    train, validation = Corpus("test", (Topic("", b"some text"),)).split("range", 0.5)
    other = {
        "content": (Corpus("test", (Topic("", b"soap text"),)).split("range", 0.5)[0], json_path),
        "tokenizer": (train, model_path),
        "side": (validation, json_path),
    }[change]
    files = [encode_split(split, open_tokenizer(path), str(tmp_path)) for split, path in ((train, json_path), other)]
    assert files[0].tokens_file.path != files[1].tokens_file.path


def test_cache_defaults_to_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    files = encode_split(split_of(b"text"), ByteTokenizer(), None)
    assert files.tokens_file.path.startswith(f"{tmp_path}/.cache/sharder/tokens/")


@pytest.mark.parametrize("tokenizer_kind", ["json", "model"])
def test_open_text_packs_the_built_in_corpus(paths, tokenizer_kind, tmp_path):
    data = DataConfig(tokenizer=paths[tokenizer_kind], token_cache=str(tmp_path), seq_len=64)
    train, _ = open_text(data, 512)
    tokenizer = open_tokenizer(paths[tokenizer_kind])
    held = open_corpus(data).split("auto", data.validation_fraction)[0]
    first = next(held.pieces()).data.tobytes().decode()
    assert train.read(np.array([0]))["inputs"][0].tolist() == tokenizer.encode(first)[:64]


# ---- kills, races and damage


def test_two_processes_encode_once_and_see_the_same(tmp_path):
    processes = [start_encoding(tmp_path, 0.5) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert outputs == ["onetwo\n"] * 2 and (tmp_path / "begun").read_text() == "x"


def test_kill_leaves_nothing_that_is_taken_for_whole(tmp_path):
    process = start_encoding(tmp_path, 60)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    files = encode_split(split_of(b"one", b"two"), Slow(str(tmp_path / "begun"), 0), str(tmp_path / "cache"))
    folders = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(left) == 1 and ".tmp-" in left[0]
    assert documents_of(files) == [list(b"one"), list(b"two")]
    assert [str(folder / "tokens.bin") for folder in folders] == [files.tokens_file.path]


def test_without_locks_the_first_to_finish_wins(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError("not supported")

    class Overtaken(ByteTokenizer):
        def encode_batch(self, texts):
            if not seen:
                seen.append("other")
                seen.append(encode_split(split_of(b"one", b"two"), Overtaken(), str(tmp_path)))
            return super().encode_batch(texts)

    seen = []
    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    files = encode_split(split_of(b"one", b"two"), Overtaken(), str(tmp_path))
    assert files == seen[1] and len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_failure_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="not UTF-8"):
        encode_split(split_of(b"\xff"), ByteTokenizer(), str(tmp_path))
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_fingerprint_is_of_the_ids_alone(tmp_path):
    """Another version of a library that gives the same ids gives the same run; one that gives others does not."""

    class Other(ByteTokenizer):
        fingerprint = "another file"

    class Shifted(ByteTokenizer):
        fingerprint = "a third"

        def encode_batch(self, texts):
            return [ids ^ 1 for ids in super().encode_batch(texts)]

    tokenizers = (ByteTokenizer(), Other(), Shifted())
    one, same, other = (encode_split(split_of(b"text"), t, str(tmp_path)).fingerprint for t in tokenizers)
    assert one == same != other


def test_error_names_file_and_byte_of_text_that_is_not_utf8(tmp_path, json_path, monkeypatch):
    monkeypatch.setattr(token_files, "CHUNK_BYTES", 8)
    content = "grün\n".encode() * 10 + b"bad \xfc byte"
    (tmp_path / "latin.txt").write_bytes(content)
    data = DataConfig(path=str(tmp_path / "latin.txt"), tokenizer=json_path, token_cache=str(tmp_path / "c"), seq_len=4)
    with pytest.raises(UserError, match=f"latin.txt is not UTF-8 at byte {content.index(0xFC)} "):
        open_text(data, 512)


def append(path):
    with open(path, "ab") as file:
        file.write(b"more")


def flip(path):
    content = bytearray(open(path, "rb").read())
    content[0] ^= 1
    open(path, "wb").write(content)


@pytest.mark.parametrize("damage", [append, flip, os.unlink])
@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "about.json"])
def test_damaged_files_are_made_again_and_it_is_said(tmp_path, caplog, name, damage):
    encode = lambda: encode_split(split_of(b"one", b"two"), ByteTokenizer(), str(tmp_path))  # noqa: E731
    damage(os.path.join(os.path.dirname(encode().tokens_file.path), name))
    assert documents_of(encode()) == [list(b"one"), list(b"two")]
    assert len(caplog.messages) == 1 and "made again" in caplog.messages[0]


def test_error_of_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"cannot be written to {tmp_path}/file/cache: Not a directory.*--data.token-cache"):
        encode_split(split_of(b"text"), ByteTokenizer(), str(tmp_path / "file" / "cache"))
