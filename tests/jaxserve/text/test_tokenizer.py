"""Text in pieces: whatever way tokens cut it, the pieces are whole characters and add up to the text."""

from __future__ import annotations

import functools
import json
import sys
import threading

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxserve.text.tokenizer import Tokenizer

TEXT = "The naïve façade of 東京 🙂👍🏽 costs 5 € — or so they say; the the the cost costs."


@functools.cache
def byte_level() -> Tokenizer:
    """A small byte-level BPE: characters beyond ASCII are several tokens, or parts of them."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    return Tokenizer(tokenizer)


def word_level(vocab: list[str], decoder=None, special: tuple[str, ...] = ()) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token=vocab[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(list(special))
    return Tokenizer(tokenizer)


def metaspace() -> Tokenizer:
    return word_level(
        ["<unk>", "▁", "▁the", "▁cat", "s", "▁sat", ".", "<0xE2>", "<0x82>", "<0xAC>", "</s>"],
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        special=("</s>",),
    )


def pieces(tokenizer, ids, prompt=()):
    stream = tokenizer.stream(prompt)
    return [*(stream.push([token]) for token in ids), stream.flush()]


def continuation(tokenizer, ids, prompt=()):
    """What comes after the prompt in the text of both."""
    before, whole = tokenizer.decode(list(prompt)), tokenizer.decode([*prompt, *ids])
    while not whole.startswith(before):  # the prompt ended within a character, which this completes
        before = before[:-1]
    return whole[len(before) :]


any_ids = st.lists(st.integers(-1, 300), max_size=40)
cut_text = st.text(st.sampled_from("a €🙂東é\ufffd"), max_size=12).map(lambda text: byte_level().encode(text))


@settings(max_examples=300, deadline=None)
@given(ids=any_ids | cut_text, prompt=any_ids | cut_text)
@example(ids=byte_level().encode("🙂👍🏽"), prompt=byte_level().encode("東")[:1])
def test_pieces_add_up_and_split_no_character(ids, prompt):
    tokenizer = byte_level()
    for before in ([], prompt):
        parts = pieces(tokenizer, ids, before)
        assert "".join(parts) == continuation(tokenizer, ids, before)
    out = ""
    for used, part in enumerate(pieces(tokenizer, ids)[:-1], 1):
        out += part
        # All is out but what may still become one character.
        assert out.rstrip("\ufffd") == tokenizer.decode(ids[:used]).rstrip("\ufffd")


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 6) | st.just(10), max_size=90), prompt=st.lists(st.integers(0, 6), max_size=30))
def test_spaces_are_those_of_the_whole_text(ids, prompt):
    tokenizer = metaspace()
    assert "".join(pieces(tokenizer, ids, prompt)) == continuation(tokenizer, ids, prompt)


def test_a_word_after_a_prompt_brings_its_space():
    tokenizer = metaspace()
    the, cat, s = 2, 3, 4
    assert "".join(pieces(tokenizer, [cat, s], prompt=[the])) == " cats"
    assert "".join(pieces(tokenizer, [the, cat])) == "the cat"


def test_bytes_that_stand_for_themselves_wait_for_the_character():
    assert pieces(metaspace(), [2, 7, 8, 9, 6]) == ["the", "", "", "€", ".", ""]


def test_a_long_run_of_characters_from_bytes():
    euros = [7, 8, 9] * 40
    assert "".join(pieces(metaspace(), [2, 6, *euros, 6])) == "the." + "€" * 40 + "."


def test_word_pieces():
    tokenizer = word_level(["[UNK]", "play", "##ing", "the", "."], decoders.WordPiece(prefix="##"))
    assert "".join(pieces(tokenizer, [3, 1, 2, 4])) == tokenizer.decode([3, 1, 2, 4]) == "the playing."
    assert "".join(pieces(tokenizer, [1, 2], prompt=[3])) == " playing"
    assert "".join(pieces(tokenizer, [3, 1, 2, 2, 2] * 30)) == tokenizer.decode([3, 1, 2, 2, 2] * 30)


def test_several_tokens_at_a_time():
    tokenizer = byte_level()
    ids, stream = tokenizer.encode(TEXT), tokenizer.stream()
    parts = [stream.push(ids[i : i + 7]) for i in range(0, len(ids), 7)]
    assert "".join(parts) + stream.flush() == TEXT


def test_an_unfinished_character_is_one_replacement_at_the_end():
    tokenizer = byte_level()
    cut = tokenizer.encode("🙂")[:-1]
    stream = tokenizer.stream()
    assert stream.push(cut) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_long_run_of_broken_bytes(monkeypatch):
    tokenizer = byte_level()
    continuation_byte = tokenizer.encode("é")[-1]
    most, text = 0, tokenizer.text

    def counting(ids):
        nonlocal most
        most = max(most, len(ids))
        return text(ids)

    monkeypatch.setattr(tokenizer, "text", counting)
    parts = pieces(tokenizer, [continuation_byte] * 3000)
    assert "".join(parts) == "\ufffd" * 3000
    assert all(parts[4:])
    assert most < 50


def test_special_and_unknown_tokens_have_no_text():
    tokenizer = byte_level()
    word = tokenizer.encode("so")
    assert tokenizer.decode([0, *word, 1, 10**6, -1]) == "so"
    assert "".join(pieces(tokenizer, [0, *word, 1, 10**6, -1])) == "so"


def write(path, tokenizer):
    (path / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")


def test_no_file_is_no_tokenizer(tmp_path):
    assert Tokenizer.from_directory(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"version": "1.0"}), "\x00\x01"])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json") as error:
        Tokenizer.from_directory(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_bytes_that_are_no_text_are_a_broken_file(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_chat_template_comes_with_it(tmp_path):
    write(tmp_path, byte_level()._tokenizer)
    assert Tokenizer.from_directory(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    template = Tokenizer.from_directory(str(tmp_path)).chat_template
    assert template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True) == "Hi!"
    for file, content, told in (
        ("chat_template.jinja", "{% for %}", "not valid Jinja"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json"),
    ):
        (tmp_path / file).write_text(content)
        with pytest.raises(ValueError, match=told):
            Tokenizer.from_directory(str(tmp_path))


def test_the_file_alone_decides_what_is_added(tmp_path):
    library = tokenizers.Tokenizer.from_str(byte_level()._tokenizer.to_str())
    write(tmp_path, library)
    plain = Tokenizer.from_directory(tmp_path)
    assert plain is not None
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    write(tmp_path, library)
    added = Tokenizer.from_directory(tmp_path)
    assert added is not None
    assert added.encode("so") == [0, *plain.encode("so")]
    assert plain.decode(plain.encode(TEXT)) == TEXT
    assert plain.vocab_size == 290


def test_truncation_and_padding_are_ignored(tmp_path):
    library = tokenizers.Tokenizer.from_str(byte_level()._tokenizer.to_str())
    library.enable_truncation(4)
    library.enable_padding(length=50)
    write(tmp_path, library)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode(TEXT) == byte_level().encode(TEXT)


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(ValueError, match="cannot be tokenised"):
        byte_level().encode("a\ud83d")


def test_the_bytes_of_single_tokens_add_up_to_the_text():
    tokenizer = byte_level()
    tokens = tokenizer.encode(TEXT)
    parts = [tokenizer.token_bytes(token) for token in tokens]
    assert b"".join(parts) == TEXT.encode()
    assert any(b"\xf0" in part and len(part) < 4 for part in parts)  # a part of a character among them
    assert tokenizer.token_bytes(0) == b"<s>"
    fallback = word_level(["<unk>", "<0xE4>", "a"], decoders.ByteFallback())
    assert [fallback.token_bytes(token) for token in (1, 2)] == [b"\xe4", b"a"]


def test_others_run_while_a_long_text_is_tokenized() -> None:
    """The interpreter's lock is free meanwhile. Here nothing else takes it from a thread that holds it."""
    tokenizer, text = byte_level(), "It was a dark and stormy night. " * 20_000
    begins, ended, seen = threading.Event(), list[bool](), None

    def tokenize() -> None:
        begins.set()
        tokenizer.encode(text)
        ended.append(True)

    other = threading.Thread(target=tokenize)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        other.start()
        begins.wait()
        seen = list(ended)
    finally:
        sys.setswitchinterval(interval)
        other.join()
    assert (seen, ended) == ([], [True])
