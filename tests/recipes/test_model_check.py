"""Model folders a user may bring, whole and broken: the message names the key, the value and the remedy."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from recipes.assets.tiny_tokenizer import tiny_tokenizer
from recipes.errors import UserError
from recipes.model_check import (
    check_chat,
    check_model_folder,
    check_same_ids,
    check_vocabulary,
    load_tokenizer,
    longest_sequence,
)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"w": np.zeros(1000, np.float32)}, folder / "model.safetensors")
    return folder


def complaint(check, *arguments) -> str:
    with pytest.raises(UserError) as raised:
        check(*arguments)
    return str(raised.value)


def test_no_such_model(tmp_path):
    assert "model.path=Qwen/Qwen3-8B: no such folder" in complaint(check_model_folder, "Qwen/Qwen3-8B")


def damage(file, text):
    """Writes `text` over the file; None removes it."""
    if text is None:
        file.unlink()
    else:
        file.write_text(text)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "not a readable JSON object"),
        ("config.json", "[]", "not a readable JSON object"),
        ("config.json", "{}", "has no model_type"),
        ("config.json", '{"model_type": "gtp2"}', "model_type = 'gtp2', which transformers .* does not know. Choose another model"),
        ("config.json", '{"model_type": "own", "auto_map": {}}', "'own'.*actor_rollout_ref.model.trust_remote_code=true"),
        ("config.json", '{"num_attention_heads": "12"}', "config.json has num_attention_heads = '12', which is no whole number"),
        ("config.json", '{"text_config": {"vocab_size": 1.5}}', "config.json has vocab_size = 1.5, which is no whole number"),
        ("config.json", '{"text_config": 5}', "config.json has text_config = 5, which is no object"),
        ("tokenizer.json", None, "has no tokenizer .*tokenizer.save_pretrained"),
        ("model.safetensors", None, "has no weights"),
        ("model.safetensors.index.json", "{", "not a readable index"),
        ("model.safetensors.index.json", '{"weight_map": {"w": 3, "v": ["a"]}}', "not a readable index"),
        ("model.safetensors.index.json", '{"weight_map": {"w": 3}}', "not a readable index"),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"w": "part-2.safetensors"}}), "not there: part-2.safetensors"),
    ],
)
def test_incomplete_model(model, name, text, message):
    damage(model / name, text)
    with pytest.raises(UserError, match=rf"model\.path={model}: .*{message}"):
        check_model_folder(model)


def test_damaged_weights(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "model.safetensors is damaged or cut short" in complaint(check_model_folder, model)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 538090408\n")
    assert "model.safetensors is damaged or cut short" in complaint(check_model_folder, model)


def test_sharded_and_pickled_weights_pass(model):
    shutil.copy(model / "model.safetensors", model / "part-1.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part-1.safetensors"}}))
    check_model_folder(model)
    for file in model.glob("*safetensors*"):
        file.unlink()
    (model / "pytorch_model.bin").touch()
    check_model_folder(model)


def test_a_model_with_code_of_its_own_passes_when_it_is_trusted(model):
    (model / "config.json").write_text('{"model_type": "own", "auto_map": {}}')
    assert check_model_folder(model, trust_remote_code=True)["model_type"] == "own"


@pytest.fixture
def tokenizer(tmp_path):
    """The folder of a tokenizer that is in order."""
    tiny_tokenizer(512).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path / "tokenizer"


def test_a_tokenizer_that_formats_messages_passes(tokenizer):
    check_chat(tokenizer)
    (tokenizer / "chat_template.jinja").unlink()
    check_chat(tokenizer, chat_template="{{ messages[0]['content'] }}")


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("tokenizer.json", "{}", r"transformers cannot load the tokenizer \("),
        ("tokenizer.json", "", r"transformers cannot load the tokenizer \(JSONDecodeError: "),
        ("chat_template.jinja", None, "has no chat template.*custom_chat_template"),
        ("chat_template.jinja", "{# nothing #}", "makes nothing of a message.*custom_chat_template"),
        ("chat_template.jinja", "{% if", r"chat template fails \(TemplateSyntaxError: .*custom_chat_template"),
        ("chat_template.jinja", "{{ raise_exception('no') }}", r"chat template fails \(TemplateError: no\).*custom_chat_template"),
    ],
)
def test_tokenizers_that_cannot_format_a_message(tokenizer, name, text, message):
    damage(tokenizer / name, text)
    with pytest.raises(UserError, match=rf"^here={tokenizer}: .*{message}"):
        check_chat(tokenizer, "here")


def test_ids_that_the_embedding_lacks(tokenizer):
    loaded = check_chat(tokenizer)
    check_vocabulary(loaded, len(loaded), "here")
    check_vocabulary(loaded, None, "here")
    with pytest.raises(UserError, match=f"^here: the tokenizer has ids up to {len(loaded) - 1} .* vocabulary of {len(loaded) - 1} "):
        check_vocabulary(loaded, len(loaded) - 1, "here")


def test_tokens_that_another_tokenizer_numbers_otherwise(tokenizer):
    own = load_tokenizer(tokenizer)
    check_same_ids(own, own, "here")
    larger = load_tokenizer(tokenizer)
    larger.add_tokens(["new"])
    check_same_ids(larger, own, "here")
    file = tokenizer / "tokenizer.json"
    vocabulary = json.loads(file.read_text())
    ids = vocabulary["model"]["vocab"]
    (a, b) = list(ids)[10:12]
    ids[a], ids[b] = ids[b], ids[a]
    file.write_text(json.dumps(vocabulary))
    with pytest.raises(UserError, match="^here: numbers 2 tokens otherwise than the model's own"):
        check_same_ids(load_tokenizer(tokenizer), own, "here")


@pytest.mark.parametrize(
    "model, longest",
    [
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default"}}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"text_config": {"max_position_embeddings": 256}, "max_position_embeddings": 512}, 256),
        ({"max_position_embeddings": 512, "rope_scaling": 5}, None),
        ({}, None),
    ],
)
def test_longest_sequence(model, longest):
    assert longest_sequence(model) == longest
