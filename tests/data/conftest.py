"""Tokenizers trained on a few topics."""

import pytest


@pytest.fixture(scope="module")
def topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)[:20]]


@pytest.fixture(scope="module")
def json_path(tmp_path_factory, topics) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>", "<s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    library.train_from_iterator(topics, trainer)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.enable_truncation(5)
    library.enable_padding(length=50)
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    library.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, topics) -> str:
    import sentencepiece

    folder = tmp_path_factory.mktemp("model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for topic in topics for line in topic.splitlines()), model_prefix=str(folder / "sp"),
        vocab_size=500, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return str(folder / "sp.model")


@pytest.fixture(scope="module")
def paths(json_path, model_path) -> dict:
    return {"bytes": None, "json": json_path, "model": model_path}
