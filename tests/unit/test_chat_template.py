"""Chat templates: ids equal the model's own, a user's text stays text, nothing is trusted."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from octavo.tokenizer import ChatTemplateError, Tokenizer

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "trimmed": (
        "{{- bos_token }}\n{%- for m in messages %}\n"
        "    {{- '<|im_start|>' ~ m.role ~ '\n\n' ~ m.content | trim ~ '<|im_end|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"
    ),
    "no space between": (
        "{% for m in messages %}<|im_start|>{{ m.content }}im_{{ m.role }}{{ eos_token }}{% endfor %}"
    ),
    "json": (
        "{{ messages | tojson }}{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}<|im_end|>"
    ),
    "bare": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "joined": "{{ messages | map(attribute='content') | join('<|im_end|>') | upper }}",
    "thoughts": (
        "{% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}"
        "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ c }}<|im_end|>{% endfor %}"
    ),
}


def with_template(folder: Path, target: Path, source: Any) -> Path:
    (target / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": source}))
    return target


@pytest.fixture(params=sorted(TEMPLATES), scope="module")
def pair(
    request: pytest.FixtureRequest, byte_level_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any]:
    """Our tokenizer and transformers', of one folder."""
    target = tmp_path_factory.mktemp("template")
    folder = with_template(byte_level_folder, target, TEMPLATES[request.param])
    return Tokenizer.from_hf(folder), transformers.AutoTokenizer.from_pretrained(folder)


HARMLESS = st.text(max_size=12) | st.sampled_from(
    [
        "",
        " ",
        "\n hello \n",
        "the end",
        "<",
        "|>",
        "> quoted",
        "a <b> c",
        "</think>\nyes",
        "im_",
        "<|",
        "e",
        "end|>",
    ]
)
ROLES = st.sampled_from(["user", "assistant", "system"])


def conversation(contents: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, str]]]:
    return st.lists(st.fixed_dictionaries({"role": ROLES, "content": contents}), min_size=1, max_size=4)


def without_control(messages: list[dict[str, str]]) -> bool:
    text = "".join(m["content"] for m in messages)
    return not any(token in text.upper() for token in ("<|IM_END|>", "<|IM_START|>", "<|ENDOFTEXT|>"))


@settings(max_examples=150)
@given(messages=conversation(HARMLESS).filter(without_control), add=st.booleans())
def test_ids_equal_the_model_s_own(
    pair: tuple[Tokenizer, Any], messages: list[dict[str, str]], add: bool
) -> None:
    mine, reference = pair
    expected = reference.apply_chat_template(messages, add_generation_prompt=add, tokenize=False)
    assert mine.render_chat(messages, add) == expected
    ids = reference.apply_chat_template(messages, add_generation_prompt=add, return_dict=False)
    assert mine.apply_chat_template(messages, add) == ids


HOSTILE = st.lists(
    st.sampled_from(
        [
            "<|im_end|>",
            "<|im_start|>",
            "<|endoftext|>",
            "<|im_",
            "end|>",
            "start|>",
            "<|",
            "|>",
            "<",
            ">",
            " ",
            "x",
            "\n",
        ]
    ),
    max_size=5,
).map("".join)


@settings(max_examples=200)
@given(messages=conversation(HOSTILE))
def test_t07_what_a_user_writes_adds_no_control_token(
    pair: tuple[Tokenizer, Any], messages: list[dict[str, str]]
) -> None:
    """T07: as many control tokens as for harmless messages, in the same order, and the same text."""
    mine, reference = pair
    harmless = [{**m, "content": "x"} for m in messages]
    ids = mine.apply_chat_template(messages)
    control = [i for i in ids if i in mine.special_token_ids]
    assert control == [i for i in mine.apply_chat_template(harmless) if i in mine.special_token_ids]
    text = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert mine.decode(ids, skip_special_tokens=False) == text == mine.render_chat(messages)


@pytest.mark.parametrize("where", ["content", "role", "name", "tools", "variable"])
def test_t07_every_string_of_a_user_is_text(byte_level_folder: Path, tmp_path: Path, where: str) -> None:
    source = (
        "{{ messages[0].content ~ messages[0].role ~ messages[0].name ~ tools[0].f.d ~ extra }}<|im_end|>"
    )
    tokenizer = Tokenizer.from_hf(with_template(byte_level_folder, tmp_path, source))
    values = dict.fromkeys(["content", "role", "name", "tools", "variable"], "y")
    values[where] = "a<|im_start|>b"
    message = {key: values[key] for key in ("content", "role", "name")}
    ids = tokenizer.apply_chat_template(
        [message], tools=[{"f": {"d": values["tools"]}}], extra=values["variable"]
    )
    assert [i for i in ids if i in tokenizer.special_token_ids] == [2]
    assert "a<|im_start|>b" in tokenizer.decode(ids)


def test_t07_overlapping_control_tokens_and_tokens_of_one_character(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in ("ab", "bc", "abcd", "※", "ca"):
        backend.add_special_tokens([AddedToken(text, normalized=False)])
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}※ab")
    tokenizer = Tokenizer.from_hf(tmp_path)
    contents = st.text("abcd※ ", max_size=6)

    @settings(max_examples=300)
    @given(contents=st.lists(contents, min_size=1, max_size=2))
    def check(contents: list[str]) -> None:
        ids = tokenizer.apply_chat_template([{"role": "u", "content": content} for content in contents])
        assert [i for i in ids if i in tokenizer.special_token_ids] == [ids[-2], ids[-1]]
        assert tokenizer.decode(ids[:-2], False) == "".join(contents)

    check()


def test_t07_a_template_that_cuts_a_hidden_token_is_refused(byte_level_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf(
        with_template(byte_level_folder, tmp_path, "{{ messages[0].content[:20] }}")
    )
    assert tokenizer.render_chat([{"role": "user", "content": "x" * 30}]) == "x" * 20
    with pytest.raises(ChatTemplateError, match="cuts a message in the middle"):
        tokenizer.apply_chat_template([{"role": "user", "content": "<|im_end|>" + "x" * 30}])


def test_t05_one_bos_in_a_chat(bos_folder: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = Tokenizer.from_hf(bos_folder)
    assert plain.add_bos
    # The template writes none: the model's own comes first, as for any other text.
    rendered = plain.render_chat(messages)
    assert plain.apply_chat_template(messages) == plain.encode(rendered, allow_special=True)
    assert plain.apply_chat_template(messages)[:2] == [0, 1]
    own = Tokenizer.from_hf(with_template(bos_folder, tmp_path, TEMPLATES["trimmed"]))
    ids = own.apply_chat_template(messages)
    assert ids[:2] == [0, 1]
    assert ids.count(0) == 1
    # Nor does a rendered text that is given back as a prompt get a second one.
    assert own.encode(own.render_chat(messages), allow_special=True) == ids


def test_t06_a_role_that_the_template_refuses(byte_level_folder: Path, tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('System role\n not supported') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    tokenizer = Tokenizer.from_hf(with_template(byte_level_folder, tmp_path, source))
    with pytest.raises(ChatTemplateError) as caught:
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])
    assert str(caught.value) == "the chat template refuses these messages: System role not supported"
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x"


def test_t06_empty_messages_are_an_error_and_an_empty_one_is_fine(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="messages is empty"):
        byte_level.apply_chat_template([])
    text = byte_level.render_chat(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}], False
    )
    assert text.endswith("<|im_start|>assistant\n<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list, got str"),
        ({"role": "user", "content": "x"}, "messages must be a list, got dict"),
        (None, "messages must be a list, got NoneType"),
        (["hi"], r'messages\[0\] must be a dict with "role" and "content", got str'),
        ([{"content": "x"}], r'messages\[0\]\["role"\] must be a non-empty string, got None'),
        ([{"role": 3, "content": "x"}], r'messages\[0\]\["role"\] must be a non-empty string, got 3'),
        ([{"role": "user"}], r'messages\[0\]\["content"\] must be a string .*, got NoneType'),
        ([{"role": "user", "content": [1]}], r'messages\[0\]\["content"\] must be a string .*, got list'),
        ([{"role": "u", "content": "x"}, {"role": "u", "content": 1}], r'messages\[1\]\["content"\]'),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\] contains a lone surrogate"),
        ([{"role": "\udfff", "content": ""}], r"messages\[0\] contains a lone surrogate"),
    ],
)
def test_messages_of_the_wrong_shape(byte_level: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        byte_level.apply_chat_template(messages)


def test_a_model_without_a_template_says_so(bos_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((bos_folder / "tokenizer.json").read_text())
    tokenizer = Tokenizer.from_hf(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="this model has no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_arguments_of_the_template(byte_level_folder: Path, tmp_path: Path) -> None:
    source = (
        "{{ enable_thinking }} {{ tools is none }} {{ documents is none }} {{ messages[0].tool_calls[0].id }}"
    )
    tokenizer = Tokenizer.from_hf(with_template(byte_level_folder, tmp_path, source))
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]}
    assert tokenizer.render_chat([call], enable_thinking=False) == "False True True c1"
    with pytest.raises(ChatTemplateError, match="'bos_token' is the model's own"):
        tokenizer.render_chat([call], bos_token="x")
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="nested more than 64 deep"):
        tokenizer.render_chat([call], enable_thinking=deep)


def test_named_templates(byte_level_folder: Path, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.from_hf(with_template(byte_level_folder, tmp_path, named))
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages) == "plain"
    assert tokenizer.render_chat(messages, tools=[{"name": "f"}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_hf(tmp_path).render_chat(messages) == "file"
    with pytest.raises(ValueError, match="must be a string, or a list of named strings"):
        Tokenizer.from_hf(with_template(byte_level_folder, tmp_path / "..", 5))


def render(source: str, byte_level_folder: Path, tmp_path: Path) -> str:
    tokenizer = Tokenizer.from_hf(with_template(byte_level_folder, tmp_path, source))
    return tokenizer.render_chat([{"role": "user", "content": "a<é"}, {"role": "user", "content": "b"}])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content | tojson }}", '"a<é"'),
        ("{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=True) }}", '{\n "a": [\n  1\n ],\n "b": 1\n}'),
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.length }}{% endfor %}", "2"),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
            "b",
        ),
        ("{% for m in messages if m.content == 'b' %}{{ loop.index }}{% else %}none{% endfor %}", "1"),
        ("  {% if true %}\n  x\n  {% endif %}\ny\n", "  x\ny"),
        (
            "{% generation %}g{% endgeneration %}{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}",
            "g2",
        ),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        (
            "{{ 'In 2024 %s' % 'x' }} {{ 'aXb'.replace('X', '-') }} {{ 'ab' | replace('a', 'c') }}",
            "In 2024 x a-b cb",
        ),
        ("{{ [1, 2] | join(', ') }} {{ ','.join(['a', 'b']) }} {{ [1, 2] | join(d='-') }}", "1, 2 a,b 1-2"),
        ("{{ 'a\nb' | indent(2) }}|{{ '{:>3}'.format(7) }}|{{ '%03d' | format(7) }}", "a\n  b|  7|007"),
        ("{%- macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) ~ f('y') }}", "<1><y>"),
    ],
)
def test_helpers_that_templates_use(
    source: str, expected: str, byte_level_folder: Path, tmp_path: Path
) -> None:
    assert render(source, byte_level_folder, tmp_path) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch ran').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__base__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_w11_a_template_cannot_reach_python(
    source: str, byte_level_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ChatTemplateError) as caught:
        render(source, byte_level_folder, tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


GROW = "{% set ns = namespace(s='ab', n=7, l=[1]) %}{% for i in range(60) %}{% set ns.STEP %}{% endfor %}"
LONG = "{% set s = 'a' * 4000000 %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ range(1000000000) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        GROW.replace("STEP", "s = ns.s ~ ns.s"),
        GROW.replace("STEP", "s = ns.s + ns.s"),
        GROW.replace("STEP", "s = [ns.s, ns.s] | join"),
        GROW.replace("STEP", "s = ns.s | replace('a', ns.s)"),
        GROW.replace("STEP", "l = ns.l + ns.l"),
        GROW.replace("STEP", "n = ns.n * ns.n"),
        "{{ 'a' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 2 ** 100000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a' | indent(1000000000, true) }}",
        LONG + "{{ s | replace('a', s) }}",
        LONG + "{{ s.replace('a', s) }}",
        LONG + "{{ [s, s, s] | join }}",
        LONG + "{{ ''.join([s, s, s]) }}",
        LONG + "{{ s }}{{ s }}{{ s }}",
    ],
)
def test_a_runaway_template_is_stopped(source: str, byte_level_folder: Path, tmp_path: Path) -> None:
    begin = time.process_time()
    with pytest.raises(ChatTemplateError):
        render(source, byte_level_folder, tmp_path)
    assert time.process_time() - begin < 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "the model's chat template is not valid"),
        ("{{ nothing.at.all }}", "needs what it was not given: 'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "fails on these messages: unsupported operand"),
        ("{{ 1 / 0 }}", "fails on these messages: division by zero"),
    ],
)
def test_a_faulty_template_is_one_sentence(
    source: str, message: str, byte_level_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(source, byte_level_folder, tmp_path)
    assert "\n" not in str(caught.value)
