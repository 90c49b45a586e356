import os
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharder.config import DataConfig, UserError
from sharder.data.corpus import Corpus, open_corpus
from sharder.data.sources import Topic


def corpus_of(*contents: bytes) -> Corpus:
    return Corpus("test", tuple(Topic(str(i), content) for i, content in enumerate(contents)))


def text_of(split) -> list[bytes]:
    return [piece.data.tobytes() for piece in split.pieces()]


def write_all(folder, files: dict[str, bytes]):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def all_text(path, **options) -> list[bytes]:
    return text_of(open_corpus(DataConfig(path=str(path), **options)).split("auto", 0.0)[0])


def write_parquet(path, column, **options):
    pq.write_table(pa.table({"id": list(range(len(column))), "text": column}), path, **options)


# ---- where text comes from


def test_built_in_corpus_is_the_topics_in_order_of_name(monkeypatch):
    monkeypatch.setattr("pydoc_data.topics.topics", {"b": "two", "a": "one", "c": "three"})
    assert text_of(open_corpus(DataConfig()).split("auto", 0.0)[0]) == [b"one", b"two", b"three"]


def test_folder_is_read_recursively_in_order_of_path(tmp_path):
    write_all(tmp_path, {"b.txt": b"three", "a/z.txt": b"two", "a/b/c.txt": b"one"})
    assert all_text(tmp_path) == [b"one", b"two", b"three"]


def test_folder_leaves_out_hidden_and_empty_files(tmp_path):
    write_all(tmp_path, {".git/x": b"no", ".hidden": b"no", "empty": b"", "text": b"yes"})
    assert all_text(tmp_path) == [b"yes"]


def test_glob_matches_recursively(tmp_path):
    write_all(tmp_path, {"a/x.txt": b"1", "a/b/y.txt": b"2", "a/x.md": b"no"})
    assert sorted(all_text(tmp_path / "**" / "*.txt")) == [b"1", b"2"]


def test_file_whose_name_looks_like_a_glob_is_found(tmp_path):
    write_all(tmp_path, {"a[1].txt": b"text"})
    assert all_text(tmp_path / "a[1].txt") == [b"text"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_parquet_rows_are_documents(tmp_path, kind):
    rows = ["one", "zwei ü", None, "", "one"]
    write_parquet(tmp_path / "x.parquet", pa.array(rows, pa.string()).cast(kind))
    assert all_text(tmp_path / "x.parquet") == [b"one", "zwei ü".encode(), b"one"]


def test_parquet_is_read_across_batches_and_row_groups(tmp_path):
    rows = [f"row {i}" for i in range(20000)]
    write_parquet(tmp_path / "x.parquet", rows, row_group_size=9000)
    assert all_text(tmp_path / "x.parquet") == [row.encode() for row in rows]


def test_pieces_name_the_row(tmp_path):
    write_parquet(tmp_path / "x.parquet", ["a", None, "b"] * 5000)
    names = [piece.name for piece in open_corpus(DataConfig(path=str(tmp_path))).split("auto", 0.0)[0].pieces()]
    assert names[-1] == f"{tmp_path}/x.parquet, row 14999"


def test_thousands_of_files_do_not_exhaust_descriptors(tmp_path):
    write_all(tmp_path, {f"{i:04}": b"%d" % i for i in range(600)})
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))\n"
        "from sharder.config import DataConfig\nfrom sharder.data.corpus import open_corpus\n"
        "train, _ = open_corpus(DataConfig(path=sys.argv[1])).split('document', 0.5)\n"
        "print(sum(len(run.source.open()) > 0 for run in train.runs()))"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 200, done.stderr


def test_no_jax_and_no_format_library_is_imported_for_bytes(tmp_path):
    program = (
        "import sys, sharder.data.text as t; from sharder.config import DataConfig; t.open_text(DataConfig(), 256)\n"
        "print([m for m in ('jax', 'pyarrow', 'tokenizers', 'sentencepiece') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


# ---- the split

documents = st.lists(st.binary(max_size=40), min_size=2, max_size=30, unique=True)
fractions = st.floats(0.01, 0.95)


@settings(deadline=None)
@given(documents, fractions)
def test_document_split_puts_each_document_on_one_side(contents, fraction):
    contents = [c for c in contents if c] + [b"x" * 50, b"y" * 50]
    train, validation = corpus_of(*contents).split("document", fraction)
    assert sorted(text_of(train) + text_of(validation)) == sorted(contents)


@settings(deadline=None)
@given(documents, fractions)
def test_document_split_leaves_neither_side_empty(contents, fraction):
    train, validation = corpus_of(*contents, b"x" * 50, b"y" * 50).split("document", fraction)
    assert text_of(train) and text_of(validation)


@settings(deadline=None)
@given(documents, fractions)
def test_document_split_keeps_copies_together(contents, fraction):
    train, validation = corpus_of(*contents, *contents, b"x" * 50).split("document", fraction)
    assert not set(text_of(train)) & set(text_of(validation))


def test_document_split_holds_out_about_the_fraction():
    contents = [os.urandom(20 + i % 50) for i in range(2000)]
    train, validation = corpus_of(*contents).split("document", 0.1)
    assert validation.num_bytes / (train.num_bytes + validation.num_bytes) == pytest.approx(0.1, abs=0.002)


def test_document_split_does_not_follow_names_or_order(tmp_path):
    contents = [b"document %d" % i for i in range(40)]
    _, validation = corpus_of(*contents).split("document", 0.2)
    _, shuffled = corpus_of(*contents[::-1]).split("document", 0.2)
    assert sorted(text_of(validation)) == sorted(text_of(shuffled))


@settings(deadline=None)
@given(documents, fractions)
def test_range_split_holds_out_the_last_bytes(contents, fraction):
    contents = [bytes(b & 0x7F for b in content) for content in contents] + [b"x"]
    whole = b"".join(contents)
    train, validation = corpus_of(*contents).split("range", fraction)
    cut = len(whole) - int(len(whole) * fraction)
    assert (b"".join(text_of(train)), b"".join(text_of(validation))) == (whole[:cut], whole[cut:])


@given(st.text(min_size=2, max_size=20), fractions)
def test_range_split_cuts_no_character(text, fraction):
    text = text.encode(errors="ignore").decode()
    train, validation = corpus_of(text.encode(), b".").split("range", fraction)
    assert "".join(b.decode() for b in text_of(train) + text_of(validation)) == text + "."


def test_range_split_cuts_inside_a_row_of_parquet(tmp_path):
    write_parquet(tmp_path / "x.parquet", ["aaaa", "bbbb"] * 5000)
    train, validation = open_corpus(DataConfig(path=str(tmp_path))).split("range", 10 / 40000)
    assert text_of(validation) == [b"bb", b"aaaa", b"bbbb"] and train.num_bytes == 39990


@pytest.mark.parametrize(("num", "how"), [(19, "range"), (20, "document")])
def test_auto_split_needs_twenty_documents(num, how):
    assert corpus_of(*[b"%d" % i for i in range(num)]).split("auto", 0.1)[0].how == how


def test_fraction_zero_has_no_validation():
    assert corpus_of(b"a", b"b").split("auto", 0.0)[1] is None


# ---- the fingerprint


def test_fingerprint_does_not_depend_on_the_place(tmp_path):
    for folder in ("a", "b"):
        write_all(tmp_path / folder, {"x": b"1", "y": b"2"})
    one, other = (open_corpus(DataConfig(path=str(tmp_path / folder))).fingerprint for folder in ("a", "b"))
    assert one == other


@pytest.mark.parametrize("other", [(b"ab", b"d"), (b"a", b"bc"), (b"c", b"ab"), (b"abc",), (b"ab", b"c", b"")], ids=repr)
def test_fingerprint_depends_on_bytes_order_and_bounds(other):
    assert corpus_of(b"ab", b"c").fingerprint != corpus_of(*other).fingerprint


def test_fingerprint_depends_on_the_column(tmp_path):
    write_parquet(tmp_path / "x.parquet", ["1", "2"])
    pq.write_table(pa.table({"text": ["1"], "other": ["2"]}), tmp_path / "x.parquet")
    one, other = (open_corpus(DataConfig(path=str(tmp_path), text_column=c)).fingerprint for c in ("text", "other"))
    assert one != other


def test_split_fingerprint_depends_on_side_manner_and_fraction():
    corpus = corpus_of(b"ab", b"cd")
    splits = [*corpus.split("range", 0.1), *corpus.split("document", 0.1), *corpus.split("range", 0.2)]
    assert len({split.fingerprint for split in splits}) == 6


def test_memory_mapped_bytes_are_not_copied(tmp_path):
    write_all(tmp_path, {"x": b"some text"})
    (piece,) = open_corpus(DataConfig(path=str(tmp_path))).split("auto", 0.0)[0].pieces()
    assert not piece.data.flags.owndata and not piece.data.flags.writeable


# ---- errors


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing.txt", "--data.path .*nothing.txt does not exist .*leave it out"),
        ("*.nothing", r"--data.path .*\*\.nothing matches no file"),
        ("dead", "--data.path .*dead is a link to nowhere, which does not exist"),
        ("pipe", "--data.path .*pipe is a device or a pipe"),
        ("/dev/null", "--data.path /dev/null is a device or a pipe"),
        ("empty.txt", "--data.path .*empty.txt is empty: 0 bytes"),
        ("folder", "--data.path .*folder is a folder without files"),
        ("broken.parquet", "broken.parquet cannot be read as parquet"),
        ("other.parquet", "no column 'text', only 'id', 'words'. .*--data.text-column"),
        ("numbers.parquet", "Column 'text' of .*numbers.parquet is int64, not text"),
        ("no-rows.parquet", "--data.path .*no-rows.parquet is empty"),
    ],
)
def test_error_of_path(tmp_path, path, message):
    write_all(tmp_path, {"empty.txt": b"", "broken.parquet": b"PAR1 not really"})
    (tmp_path / "folder").mkdir()
    (tmp_path / "dead").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    pq.write_table(pa.table({"id": [1], "words": ["x"]}), tmp_path / "other.parquet")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "numbers.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "no-rows.parquet")
    with pytest.raises(UserError, match=message):
        open_corpus(DataConfig(path=str(tmp_path / path)))


@pytest.mark.parametrize(("contents", "what"), [([b"a", b""], r"1 \(of 2\)"), ([b"a", b"a"], r"1 \(of 2\)")])
def test_error_of_document_split_without_documents(contents, what):
    with pytest.raises(UserError, match=f"{what}.*--data.validation-split range"):
        text_of(corpus_of(*contents).split("document", 0.1)[0])


def test_error_when_the_file_changes_after_it_was_opened(tmp_path):
    write_all(tmp_path, {"x": b"some text"})
    corpus = open_corpus(DataConfig(path=str(tmp_path)))
    write_all(tmp_path, {"x": b"other"})
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/x changed") + ".*9 bytes before, 5 now"):
        corpus.fingerprint


def test_document_is_found_by_number(tmp_path):
    write_all(tmp_path, {"a": b"first", "c": b"last"})
    write_parquet(tmp_path / "b.parquet", ["row 0", "row 1"])
    corpus = open_corpus(DataConfig(path=str(tmp_path)))
    assert [corpus.read(i).tobytes() for i in range(4)] == [b"first", b"row 0", b"row 1", b"last"]


def test_ranges_of_both_sides_meet():
    train, validation = corpus_of(*[b"x" * i for i in range(1, 30)]).split("range", 0.3)
    np.testing.assert_array_equal(train.ranges[1], validation.ranges[0])
