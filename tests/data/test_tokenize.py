import json

import pytest

from sharder.config import DataConfig, UserError
from sharder.data.text import open_text
from sharder.data.tokenize import open_tokenizer

TEXT = "The quick brown fox, naïve as ever, jumps over 13 lazy dogs.\n\n    def f(x): return x  # \U0001f98a\n"


@pytest.mark.parametrize("kind", ["bytes", "json", "model"])
def test_decode_inverts_encode(paths, kind):
    tokenizer = open_tokenizer(paths[kind])
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("kind", ["bytes", "json", "model"])
def test_batch_equals_one_by_one(paths, kind, topics):
    tokenizer = open_tokenizer(paths[kind])
    assert [ids.tolist() for ids in tokenizer.encode_batch(topics)] == [tokenizer.encode(topic) for topic in topics]


@pytest.mark.parametrize(("kind", "vocab_size", "end"), [("bytes", 256, None), ("json", 400, 0), ("model", 500, 2)])
def test_vocabulary_and_end_of_document(paths, kind, vocab_size, end):
    tokenizer = open_tokenizer(paths[kind])
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (vocab_size, end)


@pytest.mark.parametrize("kind", ["bytes", "json", "model"])
def test_decode_leaves_out_ids_beyond_the_vocabulary(paths, kind):
    tokenizer = open_tokenizer(paths[kind])
    assert tokenizer.decode([*tokenizer.encode("abc"), tokenizer.vocab_size, 10**6]) == "abc"


@pytest.mark.parametrize("kind", ["bytes", "json", "model"])
def test_decode_of_half_a_character_does_not_fail(paths, kind):
    tokenizer = open_tokenizer(paths[kind])
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("\U0001f98a")[:-1])


def test_truncation_padding_and_template_of_the_file_are_not_used(json_path):
    ids = open_tokenizer(json_path).encode(TEXT)
    assert len(ids) > 50 and 1 not in ids


def test_vocab_size_counts_to_the_largest_id(json_path, tmp_path):
    tree = json.loads(open(json_path).read())
    tree["added_tokens"].append(dict(tree["added_tokens"][0], id=999, content="<far>"))
    tree["model"]["vocab"]["<far>"] = 999
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    assert open_tokenizer(str(tmp_path / "tokenizer.json")).vocab_size == 1000


@pytest.mark.parametrize("end", ["<s>", {"content": "<s>"}], ids=repr)
def test_tokenizer_config_names_the_end_of_document(json_path, tmp_path, end):
    (tmp_path / "tokenizer.json").write_bytes(open(json_path, "rb").read())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.end_of_document == 1 and tokenizer.fingerprint != open_tokenizer(json_path).fingerprint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.json", "--data.tokenizer .*none.json does not exist"),
        ("x.txt", "x.txt ends in '.txt', but must be a tokenizer.json of tokenizers or a .model of sentencepiece"),
        ("x", "ends in 'no suffix'"),
        ("broken.json", "broken.json cannot be read as a .json tokenizer"),
        ("broken.model", "broken.model cannot be read as a .model tokenizer"),
    ],
)
def test_error_of_tokenizer(tmp_path, name, message):
    for broken in ("broken.json", "broken.model"):
        (tmp_path / broken).write_text("{}")
    with pytest.raises(UserError, match=message):
        open_tokenizer(str(tmp_path / name))


def test_error_of_a_model_with_fewer_ids(json_path):
    with pytest.raises(UserError, match="ids from 0 to 399, but --model.vocab-size is 256. Set --model.vocab-size 400"):
        open_text(DataConfig(tokenizer=json_path), 256)
