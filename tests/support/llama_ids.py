# ruff: noqa: RUF001
"""Records the ids of llama.cpp for forty texts and each pre-tokenizer: `python -m tests.support.llama_ids PYTHON`.

PYTHON is that of an environment with llama-cpp-python, as `benchmarks.peer --llama build` makes it. The tests compare
with what is recorded, and need no llama.cpp.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf

from gapless.models.gguf.pre_tokenizers import SPLITS
from gapless.models.tokenizer import _byte_level_table

RECORDED = Path(__file__).parents[1] / "models" / "gguf" / "llama_cpp_ids.json"
LONGEST = 5  # bytes of a token
TEXTS = (
    "I'LL don't  12345 x²,\n\n  añ١٢٣ _a__b 你好吗!?\r\nEtE end ",
    "été ñ äb",
    "été ñ äb",
    "1 12 123 1234 12345 123456 1234567",
    "a1234 b12,345.67",
    "٣٤٥٦ 12٣456 345²12345",
    "½ Ⅷ ²³ x²+y³",
    "0xFF 1e-9",
    "it's IT'S we'RE I've I'm she'LL he'd",
    "'s 't 're 'Tis ''s o'clock",
    "’s ‘quoted’ “double” — …",
    "don'tcan'twon't",
    "你好世界,再见。",
    "中文abc中文123中",
    "こんにちは世界 カタカナ ー々",
    "한국어 문장 ㄱㄴ ㅏ",
    "豈㐀龦〇 𠀀𠮷",
    "🙂👩\u200d👩\u200d👧 ok",
    "€ © ™ → ∑ ≠",
    "\ufeffstart \u200bzero",
    "\ue000 \x01\x1c end",
    "   leading",
    "trailing   ",
    "a  b   c    d         e",
    "\t\ttabs\tand \t mixed \n",
    "\n\n\n",
    "a\r\nb\r\r\nc\n \n  d",
    "\xa0nbsp\u3000wide\u2003em\u2028line\x85next",
    " \xa0 \u3000 x",
    "\u2028a！ \u2028ア",
    "Привет Мир приВЕТ",
    "ΑΒΓ αβγ Ǆǅǆ ʰª",
    "שלום مرحبا، नमस्ते। ไทย",
    "camelCase HTTPServer XMLHttp ÉcoleÀB",
    "ſ 'ſ K İı",
    "def f(x):\n    return x[0]  # ok\n\n\n",
    'if (a != b && c->d) { s = "x\\n"; }',
    "https://a.b/c?d=e&f=g#h //x /y/ ",
    "$1+2<3=4>5^6~7|8`9",
    "(a),(b)!?.;:",
    "a|b||c . , ! ?",
    "____ -- == ***",
    "Ünïcödé Ḁḃ ﬁ ℵ 𝒳 𐐀",
)
ASK = """
import json, sys
from llama_cpp import Llama, llama_cpp
from pathlib import Path
found = {}
for file in sorted(Path(sys.argv[1]).glob("*.gguf")):
    llama = Llama(str(file), vocab_only=True, verbose=False)
    found[file.stem] = [llama.tokenize(t.encode(), add_bos=True, special=True) for t in json.loads(sys.argv[2])]
print(json.dumps(found))
"""


def vocabulary() -> tuple[list[str], list[str]]:
    """Return tokens and merges: each short piece of the texts is a token, so that ids show the cuts."""
    character = {byte: char for char, byte in _byte_level_table().items()}
    tokens = {character[byte]: None for byte in range(256)} | dict.fromkeys(("<s>", "</s>", "<tool>"))
    merges = []
    for length in range(2, LONGEST + 1):
        for text in TEXTS:
            written = "".join(character[byte] for byte in text.encode())
            for start in range(len(written) - length + 1):
                token = written[start : start + length]
                if token not in tokens:
                    tokens[token] = None
                    merges.append(f"{token[:-1]} {token[-1]}")
    return list(tokens), merges


def write_vocabulary(file: Path, pre: str | None, **more: Any) -> Path:
    """Write a GGUF file with this vocabulary and a pre-tokenizer; None leaves its field out."""
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([{"<s>": 3, "</s>": 3, "<tool>": 4}.get(token, 1) for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def digest(ids: Sequence[int]) -> str:
    """Return a short hash of token ids."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:8]


def main() -> None:
    """Record the hashes of llama.cpp's ids."""
    with tempfile.TemporaryDirectory() as folder:
        for pre in (*SPLITS, None):
            write_vocabulary(Path(folder) / f"{pre}.gguf", pre)
        ask = [sys.argv[1], "-c", ASK, folder, json.dumps(TEXTS)]
        found = json.loads(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    hashes = {pre: " ".join(map(digest, ids)) for pre, ids in found.items()}
    RECORDED.write_text(json.dumps(hashes, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
