"""Chat templates: where they are found, what they may do, and what they may not."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_cases import byte_level, write_tokenizer

from colibri_mp.errors import CheckpointError, RequestError
from colibri_mp.tokenizer import Tokenizer

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
)
USER = [{"role": "user", "content": "hello"}]


def tokenizer_with(folder: Path, **config: Any) -> Tokenizer:
    """A tokenizer whose tokenizer_config.json says this."""
    tokenizer = Tokenizer.load(write_tokenizer(folder, byte_level(), **config))
    assert tokenizer is not None
    return tokenizer


def render(folder: Path, template: str, **options: Any) -> str:
    """What a template makes of one user message."""
    return tokenizer_with(folder, chat_template=template).apply_chat_template(USER, **options)


def test_chat_ids(tmp_path: Path) -> None:
    """Markers become special tokens, nothing is added around them, and the assistant's turn is opened."""
    tokenizer = tokenizer_with(tmp_path, chat_template=CHATML, add_bos_token=True, bos_token="<|endoftext|>")
    assert tokenizer.apply_chat_template(USER) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in ("user\nhello", "\n", "assistant\n")]
    assert tokenizer.encode_chat(USER) == [1, *plain[0], 2, *plain[1], 1, *plain[2]]
    assert tokenizer.apply_chat_template(USER, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_where_templates_are_found(tmp_path: Path) -> None:
    """The file wins over the config; a list holds named ones; an older file of its own is read too."""
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = tokenizer_with(tmp_path, chat_template=named)
    assert tokenizer.apply_chat_template(USER) == "D"
    assert tokenizer.apply_chat_template(USER, tools=[{"type": "function"}]) == "T"
    (tmp_path / "chat_template.jinja").write_text("F")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("A")
    tokenizer = tokenizer_with(tmp_path, chat_template=named)
    assert tokenizer.apply_chat_template(USER) == "F"
    assert tokenizer.apply_chat_template(USER, tools=[{"type": "function"}]) == "A"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert tokenizer_with(tmp_path).apply_chat_template(USER) == "J"


def test_no_template(tmp_path: Path) -> None:
    """A base model's checkpoint has none: chat is refused, plain prompts are not."""
    tokenizer = tokenizer_with(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.encode_chat(USER)


def test_template_of_a_wrong_kind(tmp_path: Path) -> None:
    """A template that is neither text nor a list of named texts."""
    for stated in ({"a": 1}, [{"name": "default"}], ["x"], 7):
        with pytest.raises(CheckpointError, match="neither a text nor a list of named texts"):
            tokenizer_with(tmp_path, chat_template=stated)


def test_what_templates_use(tmp_path: Path) -> None:
    """The globals, filters, tags and white-space rules that published templates rely on."""
    template = (
        "{% for m in messages %}\n  {% if loop.index0 > 5 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ {'a': '<é>', 'b': [1]} | tojson }}{{ bos_token }}{{ enable_thinking }}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = tokenizer_with(tmp_path, chat_template=template, bos_token={"content": "<|endoftext|>"})
    text = tokenizer.apply_chat_template(USER, enable_thinking=False)
    assert text == 'hello{"a": "<é>", "b": [1]}<|endoftext|>False4'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{% for %}", "chat template is not valid .line 1"),
        ("{{ messages.append(1) }}", "refuses these messages.*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages.*unsafe"),
        ("{{ messages[0].content + 1 }}", "refuses these messages.*str"),
        ("{{ messages[5].content }}", "refuses these messages"),
        ("{{ 1 // 0 }}", "refuses these messages"),
        ("{{ range(10 ** 9) }}", "refuses these messages.*too big"),
    ],
)
def test_template_that_cannot_be_rendered(tmp_path: Path, template: str, message: str) -> None:
    """A template that refuses, is broken, or tries what the sandbox forbids fails this request only."""
    with pytest.raises(RequestError, match=message):
        render(tmp_path, template)
