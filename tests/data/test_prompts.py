import numpy as np
import pytest

from sharder.config import UserError
from sharder.data.prompts import PALIGEMMA_VOCAB_SIZE, PromptEncoder, clean, digitize, open_prompt_tokenizer, with_state
from sharder.data.tokenize import ByteTokenizer

NO_STATES = np.zeros((1, 2), np.float32)


def ids(text: str) -> list[int]:
    return [256, *text.encode()]


def test_a_prompt_of_pi0_is_the_task_and_an_end_of_line():
    tokens, mask = PromptEncoder(ByteTokenizer(), False, 20, 257)(["  pick_up\nthe cup "], NO_STATES)
    wanted = ids("pick up the cup\n")
    assert tokens[0].tolist() == wanted + [0] * 3 and mask[0].tolist() == [True] * 17 + [False] * 3


def test_a_prompt_of_pi05_holds_the_state():
    state = np.array([[-1.0, 0.0, 0.999, 5.0, -1.5]], np.float32)
    tokens, mask = PromptEncoder(ByteTokenizer(), True, 80, 257)(["fold_it"], state)
    wanted = ids("Task: fold it, State: 0 128 255 255 -1;\nAction: ")
    assert tokens[0, : len(wanted)].tolist() == wanted and mask.sum() == len(wanted)


def test_bins_are_of_equal_width_and_closed_below():
    edges = np.linspace(-1, 1, 257)[:-1]
    assert digitize(edges).tolist() == list(range(256))
    assert digitize(edges - 1e-9).tolist() == list(range(-1, 255))


def test_a_long_prompt_is_cut_and_its_length_known():
    encoder = PromptEncoder(ByteTokenizer(), False, 5, 257)
    tokens, mask = encoder(["abcdefgh"], NO_STATES)
    assert tokens[0].tolist() == ids("abcd") and mask.all()
    assert encoder.num_tokens("abcdefgh", 2) == 10
    assert PromptEncoder(ByteTokenizer(), True, 5, 257).num_tokens("a", 3) == len(ids(with_state("a", np.zeros(3))))


def test_a_model_with_too_few_ids_is_named():
    with pytest.raises(UserError, match="--model.vocab-size is 256. Set it to 257"):
        PromptEncoder(ByteTokenizer(), False, 5, 256)


def test_cleaning():
    assert clean(" a_b\nc ") == "a b c"


def test_tiny_models_need_no_file():
    assert isinstance(open_prompt_tokenizer(None, 512), ByteTokenizer)


def test_paligemma_is_asked_for_where_a_model_has_its_vocabulary():
    with pytest.raises(
        UserError, match="Fetch gs://big_vision/paligemma_tokenizer.model to one of them, or give --data.tokenizer"
    ):
        open_prompt_tokenizer(None, PALIGEMMA_VOCAB_SIZE)


def test_paligemma_is_found_in_a_cache(tmp_path, monkeypatch):
    """Any model of sentencepiece will do here: that the file is read, and begins texts with its own token."""
    import sentencepiece

    folder = tmp_path / ".cache" / "sharder"
    folder.mkdir(parents=True)
    texts = ["pick up the cup", "put the cup on the table", "open the drawer"] * 20
    options = {"vocab_size": 26, "bos_id": 2, "eos_id": 1, "unk_id": 3, "pad_id": 0, "minloglevel": 2}
    prefix = str(folder / "paligemma_tokenizer")
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=prefix, **options)
    monkeypatch.setenv("HOME", str(tmp_path))
    library = sentencepiece.SentencePieceProcessor(model_file=prefix + ".model")
    encoder = PromptEncoder(open_prompt_tokenizer(None, PALIGEMMA_VOCAB_SIZE), False, 30, PALIGEMMA_VOCAB_SIZE)
    tokens, mask = encoder(["open the cup"], NO_STATES)
    assert tokens[mask].tolist() == [2, *library.encode("open the cup"), *library.encode("\n")]
