"""A checkpoint that says what a test dictates: each token of a script leads to the next one.

A grammar may force single bytes where a script has longer tokens. Attention to the token that began the script recovers
from that: after an opening quote the model says a value of this script that is allowed, and it prefers the script's
tokens to others.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

LAYERS, HEADS = 2, 8
END = "<|im_end|>"
TEMPLATE = """\
{%- for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>{% endfor -%}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor -%}
{%- set turn = messages | selectattr('role', 'equalto', 'tool') | list | length -%}
{%- set asked = (messages | selectattr('role', 'equalto', 'user') | list)[0].content -%}
{#- MARKS -#}
{{- reasoning_effort or '' -}}
{%- set off = 'n' if asked == 'think' and enable_thinking is defined and not enable_thinking else '' -%}
{{- '<|' ~ asked ~ turn ~ off ~ '|>' }}{{ '<think>' if asked == 'json' }}"""


def scripted_model(
    folder: Path,
    scripts: Mapping[str, str],
    marks: str,
    special: tuple[str, ...] = (),
    *,
    template: str = TEMPLATE,
    context: int = 4096,
) -> Path:
    """Write a checkpoint to a folder.

    Args:
        folder: is made.
        scripts: what the model says, by the first user's text and the number of results of tools behind it; "think0n"
            where thinking is off. Two scripts share no token: each is cut at random, into pieces that none has.
        marks: text in the chat template that tells the format of calls and reasoning.
        special: texts that are special tokens, as the model's own end is.
        template: writes the prompt, which ends with what leads to a script.
        context: tokens that it has room for.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = dict.fromkeys([*alphabet, END, *special, *(start_of(name) for name in scripts)])
    rng, follows = random.Random(0), dict[str, str]()
    weights = dict[tuple[str, str], float]()  # by what comes next and what is there: a token, or a script's name
    for name, text in scripts.items():
        own = [each for each in special if each not in follows]  # a token has one place in all scripts
        pieces: list[str] = []
        for part in re.split(f"({'|'.join(map(re.escape, own))})", text) if own else [text]:
            pieces += [part] if part in own else _cut(part, known, rng)
        weights |= {(piece, name): 0.3 for piece in pieces if '"' not in piece}
        last = start_of(name)
        for piece in (*pieces, END):
            follows[last] = last = piece
        for number, value in enumerate(re.findall(r': "((?:[^"\\]|\\.)+")', text)):
            if _as_bytes(value) in known:
                continue
            pieces = _cut(value, known, rng)
            weights |= {(piece, name): 0.3 for piece in pieces if '"' not in piece or piece == pieces[0]}
            weights[pieces[0], '"'] = 0.5 + number / 50
            follows |= dict(itertools.pairwise(pieces))
    ids = {text: number for number, text in enumerate(known)}
    V, S = len(ids), len(scripts)
    H = -(-max(V + S, HEADS * S) // 128) * 128  # a dimension for each token and each script
    places = ids | {name: V + number for number, name in enumerate(scripts)}
    folder.mkdir(parents=True)
    write_tokenizer(folder, [END, *special, *(start_of(name) for name in scripts)], ids)
    (folder / "chat_template.jinja").write_text(template.replace("MARKS", marks))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(ids), "hidden_size": H,
        "intermediate_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 1,
        "max_position_embeddings": context, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": ids[END], "bos_token_id": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    head = torch.zeros(V, H)
    head[:256, :V] = 0.1  # bytes
    head[[ids[each] for each in '"]}'], :V] = torch.tensor([[0.4], [0.15], [0.15]])
    head[ids[END], :V] = 1.0  # what follows any other token
    head[ids[END], ids['"']] = 0.0
    for before, after in follows.items():
        head[ids[END], ids[before]], head[ids[after], ids[before]] = 0.0, 1.0
    for (after, before), weight in weights.items():
        head[ids[after], places[before]] = weight
    tensors = {
        "model.embed_tokens.weight": torch.eye(V, H),
        "lm_head.weight": head * 10,
        "model.norm.weight": torch.ones(H),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {f"{name}.self_attn.{each}_proj.weight": torch.zeros(H, H) for each in "qo"}
        tensors |= {f"{name}.self_attn.{each}_proj.weight": torch.zeros(H // HEADS, H) for each in "kv"}
        tensors |= {f"{name}.mlp.{each}_proj.weight": torch.zeros(16, H) for each in ("gate", "up")}
        tensors |= {f"{name}.mlp.down_proj.weight": torch.zeros(H, 16)}
        tensors |= {f"{name}.{each}_layernorm.weight": torch.ones(H) for each in ("input", "post_attention")}
    slowest, first = H // HEADS // 2 - 1, "model.layers.0.self_attn"  # what RoPE turns least
    tensors[f"{first}.q_proj.weight"][slowest, :V] = 1.0
    for number, name in enumerate(scripts):
        start = ids[start_of(name)]
        tensors[f"{first}.k_proj.weight"][slowest, start] = 1.0
        tensors[f"{first}.v_proj.weight"][number, start] = H**-0.5
        tensors[f"{first}.o_proj.weight"][places[name], number] = 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def start_of(name: str) -> str:
    """Return the special token that leads to a script. That of a name with json begins the reasoning, too."""
    return f"<|{name}|>" + ("<think>" if name.startswith("json") else "")


def _cut(text: str, known: dict[str, None], rng: random.Random) -> list[str]:
    """Cut a text into new pieces, as a vocabulary of bytes writes them."""
    pieces: list[str] = []
    while text:
        length = rng.randint(1, 4)
        while length < len(text) and _as_bytes(text[:length]) in known:
            length += 1
        piece, text = text[:length], text[length:]
        while _as_bytes(piece) in known:  # the end of the text, which then belongs to the piece before
            piece = pieces.pop() + piece
        pieces.append(piece)
        known[_as_bytes(piece)] = None
    return [_as_bytes(piece) for piece in pieces]


def write_tokenizer(folder: Path, special: list[str], ids: Mapping[str, int] | None = None) -> None:
    """Write a tokenizer of bytes and special tokens, of which the first ends outputs.

    Args:
        folder: is there.
        special: texts of tokens.
        ids: by token, as bytes are written; None: bytes, then the special tokens.
    """
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    vocab = {text: number for number, text in enumerate(known)} if ids is None else dict(ids)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[0]}))


def _as_bytes(text: str) -> str:
    """Write a text in GPT-2's alphabet of bytes."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in pre.pre_tokenize_str(text))
