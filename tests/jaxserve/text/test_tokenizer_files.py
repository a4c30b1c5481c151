"""Tokenizers without tokenizer.json: they answer as the programs do that their files are of."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxserve.text import tokenizer_files
from jaxserve.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2] / "fixtures" / "formats"
ANSWERS: dict[str, dict[str, list[Any]]] = json.loads((FOLDER / "tokens.json").read_text(encoding="utf-8"))


def read(folder: Path, name: str, config: dict[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a copy of a fixture, with this tokenizer_config.json."""
    shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("name", ANSWERS["sentencepiece"])
def test_sentencepiece_models_answer_alike(tmp_path, name):
    tokenizer = read(tmp_path, name, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False})
    for text, ids, decoded in ANSWERS["sentencepiece"][name]:
        assert tokenizer.encode(text) == ids, text
        if "⁇" not in decoded and text[0] != "▁":  # what sentencepiece shows for what is unknown; its own space
            assert tokenizer.decode(ids) == decoded, text


@pytest.mark.parametrize("name", ["opt", "qwen2"])
def test_byte_level_tokenizers_answer_alike(tmp_path, name):
    tokenizer = read(tmp_path, name)
    for text, ids, decoded in ANSWERS["transformers"][name]:
        assert tokenizer.encode(text) == ids, text
        assert tokenizer._tokenizer.decode(ids, skip_special_tokens=False) == decoded, text


def test_special_tokens_in_a_text_are_tokens(tmp_path):
    tokenizer = read(tmp_path, "llama", {"tokenizer_class": "LlamaTokenizer", "legacy": False})
    for text, ids, _ in ANSWERS["transformers"]["llama"]:
        assert tokenizer.encode(text, special_tokens=False) == ids, text
    assert tokenizer.encode("</s>")[-1] == 2
    assert tokenizer.decode([1, 2]) == ""


def test_a_space_is_put_before_each_part_or_the_first(tmp_path):
    text = "</s>in</s>in"
    tokens = {}
    for legacy in (True, False):
        tokenizer = read(tmp_path, "llama", {"tokenizer_class": "LlamaTokenizer", "legacy": legacy})
        tokens[legacy] = [tokenizer._tokenizer.id_to_token(i) for i in tokenizer.encode(text, special_tokens=False)]
    assert tokens[True] == ["</s>", "▁in", "</s>", "▁in"]
    assert tokens[False] == ["</s>", "in", "</s>", "in"]
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("in") == [1, *tokenizer.encode("in", special_tokens=False)]
    assert [tokenizer._tokenizer.id_to_token(i) for i in tokenizer.encode(text, special_tokens=False)] == tokens[True]


@pytest.mark.parametrize(
    ("config", "around"),
    [
        ({}, [1, "$"]),
        ({"add_bos_token": False}, ["$"]),
        ({"add_eos_token": True, "eos_token": "</s>"}, [1, "$", 2]),
        ({"bos_token": {"content": "</s>"}}, [2, "$"]),
    ],
)
def test_what_is_put_around_a_text(tmp_path, config, around):
    tokenizer = read(tmp_path, "llama", {"tokenizer_class": "LlamaTokenizerFast"} | config)
    text = tokenizer.encode("some text", special_tokens=False)
    expected = [i for each in around for i in (text if each == "$" else [each])]
    assert tokenizer.encode("some text") == expected


@pytest.mark.parametrize("name", ["llama", "unigram", "opt"])
def test_added_tokens_have_their_ids(tmp_path, name):
    kind = "GPT2Tokenizer" if name == "opt" else "LlamaTokenizer"
    plain = read(tmp_path, name, {"tokenizer_class": kind})
    first = plain.vocab_size
    decoder = {
        str(first): {"content": "<turn>", "special": True, "normalized": False},
        str(first + 1): {"content": "<think>", "special": False, "normalized": False},
    }
    tokenizer = read(tmp_path, name, {"tokenizer_class": kind, "added_tokens_decoder": decoder})
    ids = tokenizer.encode("a<turn>b<think>", special_tokens=False)
    assert [i for i in ids if i >= first] == [first, first + 1]
    assert "<think>" in tokenizer.decode(ids)
    assert "<turn>" not in tokenizer.decode(ids)
    assert tokenizer.vocab_size == first + 2
    file, ids = tokenizer_files.vocabulary(tmp_path)
    assert file == tmp_path / ("vocab.json" if name == "opt" else "tokenizer.model")
    assert (ids["<turn>"], ids["<think>"], max(ids.values())) == (first, first + 1, first + 1)


def test_special_tokens_map_is_a_fallback(tmp_path):
    shutil.copytree(FOLDER / "opt", tmp_path, dirs_exist_ok=True)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<pad>", "additional_special_tokens": ["a"]}')
    tokenizer = read(tmp_path, "opt", {"tokenizer_class": "GPT2Tokenizer", "eos_token": None, "cls_token": "<none>"})
    assert tokenizer.decode(tokenizer.encode("<pad>b a")) == "b "
    assert tokenizer.vocab_size == 501  # <none> is no token of the model
    assert len(tokenizer.encode("<none>")) > 1


def test_tokenizer_json_wins(tmp_path):
    read(tmp_path, "opt")
    tokenizer = read(tmp_path, "llama", {"tokenizer_class": "LlamaTokenizer"})
    (tmp_path / "tokenizer.json").write_text(read(tmp_path / "other", "qwen2").to_json())
    whole = Tokenizer.from_directory(tmp_path)
    assert whole is not None
    assert whole.vocab_size == 500 != tokenizer.vocab_size


def changed(name: str, content: bytes | str | None = None, **config: Any):
    """A fault: a file of other content, or an entry of tokenizer_config.json."""

    def change(folder: Path) -> None:
        if config:
            file = folder / "tokenizer_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | config))
        elif content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


MODEL = (FOLDER / "llama" / "tokenizer.model").read_bytes()
FAULTS = {
    "cut short": ("llama", changed("tokenizer.model", MODEL[:-3]), r"model: is not a sentencepiece model, or is trunc"),
    "cut in what is not read": ("llama", changed("tokenizer.model", MODEL + b"\x7a\x05ab"), r"model, or is truncated"),
    "another format": ("llama", changed("tokenizer.model", b"IQ== 0\nIg== 1\n"), r"model: is not a sentencepiece"),
    "not UTF-8": ("llama", changed("tokenizer.model", MODEL + b"\x0a\x04\x0a\x02\xff\xfe"), r"model, or is truncated"),
    "empty": ("llama", changed("tokenizer.model", b""), r"model: is not a sentencepiece model: it has no piece for"),
    "an endless number": ("llama", changed("tokenizer.model", b"\xff" * 20), r"is not a sentencepiece model"),
    "words": ("llama", changed("tokenizer.model", MODEL + b"\x12\x02\x18\x03"), r"is a sentencepiece model of kind 3"),
    "spaces after": ("llama", changed("tokenizer.model", MODEL + b"\x12\x03\xc0\x01\x01"), r"with spaces after words"),
    "plain spaces": ("llama", changed("tokenizer.model", MODEL + b"\x1a\x02\x28\x00"), r"or unescaped spaces, which"),
    "another class": ("llama", changed("", tokenizer_class="XLNetTokenizer"), r"model: is of XLNetTokenizer, which"),
    "no class": (
        "llama",
        changed("", tokenizer_class=""),
        r"has no tokenizer_class in tokenizer_config.json, which is",
    ),
    "another class of merges": (
        "opt",
        changed("", tokenizer_class="RobertaTokenizer"),
        r"json: is of RobertaTokenizer",
    ),
    "merges of three": ("opt", changed("merges.txt", "a b c\n"), r"merges.txt beside it has lines that are not pairs"),
    "merges of others": ("opt", changed("merges.txt", "東 京\n"), r"vocab.json: .*out of vocabulary"),
    "no vocabulary": ("opt", changed("vocab.json", "[]"), r"vocab.json: vocab.json does not hold a JSON object"),
    "no JSON": ("opt", changed("tokenizer_config.json", "{"), r"tokenizer_config.json is not JSON"),
    "bos that is no token": ("opt", changed("", bos_token="<none>"), r"puts \['<none>', '\$A'\] around a text"),
    "an id that is taken": (
        "unigram",
        changed("", added_tokens_decoder={"3": {"content": "<new>"}}),
        r"the token '<new>' is added with id 3, which is taken",
    ),
    "an id beyond the next": (
        "unigram",
        changed("", added_tokens_decoder={"900": {"content": "<new>"}}),
        r"the token '<new>' is added with id 900; 600 would be the next id",
    ),
}


@pytest.mark.parametrize(("name", "change", "message"), FAULTS.values(), ids=FAULTS)
def test_files_that_cannot_be_read_are_named(tmp_path, name, change, message):
    kind = "GPT2Tokenizer" if name == "opt" else "LlamaTokenizer"
    read(tmp_path, name, {"tokenizer_class": kind, "bos_token": "</s>", "add_bos_token": True})
    change(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.from_directory(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_vocabularies_without_merges_are_no_tokenizer(tmp_path):
    read(tmp_path, "opt")
    (tmp_path / "merges.txt").unlink()
    assert Tokenizer.from_directory(tmp_path) is None
