import logging
from dataclasses import replace

import numpy as np
import pytest

from sharder.config import UserError
from sharder.data.prompt import (
    BytePrompts, SentencePiecePrompts, open_prompt_tokenizer, prompt_encoder, prompt_tokens, state_levels,
)  # fmt: skip
from sharder.recipes import load_recipe

PI0, PI05 = load_recipe("pi0_tiny").model, load_recipe("pi05_tiny").model


def text_of(tokens: list[int]) -> str:
    return bytes(t - BytePrompts.first for t in tokens if t >= BytePrompts.first).decode()


def test_pi0_reads_the_task_and_an_end_of_line():
    tokens = prompt_tokens("pi0", BytePrompts(), "  pick_up\nthe cup ", np.zeros(3))
    assert tokens[0] == 2 and text_of(tokens) == "pick up the cup\n"


def test_pi05_reads_the_state_too():
    tokens = prompt_tokens("pi05", BytePrompts(), "pick_up the cup", np.array([-1.0, 0.0, 0.999]))
    assert tokens[0] == 2 and text_of(tokens) == "Task: pick up the cup, State: 0 128 255;\nAction: "


def test_levels_have_equal_width():
    centres = -1 + (np.arange(256) + 0.5) / 128
    assert state_levels(centres).tolist() == list(range(256))


def test_a_state_out_of_range_is_minus_one_or_the_last_level():
    assert state_levels(np.array([-1.5, 1.5])).tolist() == [-1, 255]


def test_prompts_are_filled_up_and_masked():
    tokens, mask = prompt_encoder(PI0, BytePrompts())(["a", "abc"], np.zeros((2, 3)))
    assert mask.sum(1).tolist() == [3, 5] and (tokens[~mask] == 0).all() and tokens.shape == (2, PI0.max_prompt_len)


def test_a_prompt_that_is_too_long_is_cut_with_one_warning(caplog):
    encode = prompt_encoder(PI0, BytePrompts())
    with caplog.at_level(logging.WARNING):
        _, mask = encode(["x" * 50, "y" * 50], np.zeros((2, 3)))
    assert mask.all() and len(caplog.records) == 1 and "52 tokens is cut to the 16" in caplog.text


def test_a_token_beyond_the_vocabulary_is_refused():
    with pytest.raises(UserError, match="token 125, but --model.vocab-size is 100"):
        prompt_encoder(replace(PI0, vocab_size=100), BytePrompts())(["z"], np.zeros((1, 3)))


def test_tiny_models_need_no_file():
    assert isinstance(open_prompt_tokenizer(None, PI0.vocab_size), BytePrompts)


def test_paligemma_is_asked_for_only_when_text_is_tokenised():
    tokenizer = open_prompt_tokenizer(None, 257_152)
    with pytest.raises(UserError, match="Fetch gs://big_vision/paligemma_tokenizer.model to one of them, or give --data.tokenizer"):
        tokenizer.encode("x")


def test_sentencepiece_is_read_from_a_path(tmp_path):
    import sentencepiece

    texts = ["pick up the cup", "put the cup on the table", "open the drawer"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(tmp_path / "x"), vocab_size=26, bos_id=2, eos_id=1, unk_id=3, pad_id=0, minloglevel=2
    )
    tokenizer = SentencePiecePrompts(str(tmp_path / "x.model"))
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "x.model"))
    assert prompt_tokens("pi0", tokenizer, "open the cup", np.zeros(1)) == [2, *library.encode("open the cup"), *library.encode("\n")]
