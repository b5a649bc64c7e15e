"""Pre-tokenizer regexes of byte-level GGUF tokenizers, by `tokenizer.ggml.pre`.

Source: `llm_tokenizer_bpe` in src/llama-vocab.cpp and src/unicode.cpp of llama.cpp, as in llama-cpp-python 0.3.36. The
rules follow llama.cpp, which differs from some models' tokenizer.json: it does not normalize, splits only at ASCII
capitals, and does not distinguish letter categories.
"""

from __future__ import annotations

_ENDS = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_START = r"[^\r\n\p{L}\p{N}]?"
_LINES = r"|\s*[\r\n]+|"
_SPACES = _LINES + r"\s+(?!\S)|\s+"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_WORDS = rf"{_ENDS}|{_START}\p{{L}}+|"
_MARKED_WORDS = rf"{_START}[\p{{L}}\p{{M}}]+(?:{_ENDS})?|"


def _cased(letters: str, ends: str = "") -> str:
    """Return the regex for words; an ASCII capital after other letters starts a new word."""
    upper, lower = f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    return f"{_START}{upper}*{lower}+{ends}|{_START}{upper}+{lower}*{ends}|"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _OTHERS + _SPACES
_QWEN2 = _WORDS + r"\p{N}" + _OTHERS + _SPACES
_DEEPSEEK3 = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK_LLM = (  # cased letters, except scripts that DeepSeek's list omits
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}"
    r"\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF2A}]]+"
)
_IDEOGRAPHS = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}&&[^\s]]+"
_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
_HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2CEAF}\x{2CEB0}-\x{2EBEF}\x{F900}-\x{FAFF}"
    r"\x{2F800}-\x{2FA1F}"
)
_SENTENCES = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_THREES = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # digits in threes, counted from the end of a run
_LEFT = "(?=(?:[0-9]{3})*(?![0-9]))"  # a multiple of three digits remains in the run
# The first regex splits the text, the next splits each piece, and so on.
_RULES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("default",): (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "gigachat", "granite-docling"): (_GPT2,),
    ("a.x-4.0", "mellum"): (_GPT2,),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): (r"\p{N}", _GPT2),
    ("falcon",): (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): (_LLAMA3,),
    ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"): (_LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"): (_QWEN2,),
    ("qwen35",): (
        rf"{_ENDS}|{_START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*" + _SPACES,
    ),
    ("laguna",): (r"[^\n]+|\n+", _QWEN2),
    ("ufakzeka",): (_START + r"\p{L}+|\p{N}" + _OTHERS + _SPACES,),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): (
        _cased(r"\p{L}", f"(?:{_ENDS})?") + r"\p{N}{1,3}" + _PATHS,
    ),
    ("tekken",): (_cased(r"\p{L}") + r"\p{N}" + _PATHS,),
    ("tiny_aya", "cohere2moe"): (_THREES, _MARKED_WORDS + r"\p{N}{1,3}" + _PATHS),
    ("youtu",): (
        r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}"
        rf"\x{{FF0C}}\x{{3001}}-\x{{303F}}\x{{FE30}}-\x{{FE4F}}]+|[\x{{3105}}-\x{{312F}}]+|{_KANA}",
        _MARKED_WORDS + r"\p{N}" + _PATHS,
    ),
    ("kimi-k2",): (
        rf"[{_HAN}]+|{_START}[\p{{L}}&&[^{_HAN}]]+(?:{_ENDS})?|" + r"\p{N}{1,3}" + _OTHERS + _SPACES,
    ),
    ("seed-coder",): (_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES,),
    ("minicpm5",): (r"\p{N}{1,3}", _WORDS + r"\p{N}+" + _OTHERS + _SPACES),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (
        _WORDS + r"\p{N}" + _OTHERS + r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("exaone-moe",): (
        rf"{_ENDS}|{_START}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("jais-2",): (
        _WORDS + r"\p{N}{1,3}" + _OTHERS + _LINES
        + "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"\s",
    ),
    ("deepseek-llm",): (
        *(r"[\r\n]", _DEEPSEEK_LLM),
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}\x{3002}]+",
        *(r"\s+$", _IDEOGRAPHS, r"\p{N}+"),
    ),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): (
        r"\p{N}{1,3}", _KANA, _DEEPSEEK3 + r"[\r\n]*" + _SPACES,
    ),
    ("spark2_5",): (r"\p{N}{1,3}", _KANA, _DEEPSEEK3 + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
    ("poro-chat", "bloom", "gpt3-finnish"): (_SENTENCES,),
    ("viking",): (_SENTENCES, r"\p{N}"),
    ("superbpe",): (r"\p{N}+", rf"[0-9]{{3}}{_LEFT}(?:[^0-9]+[0-9]{{0,2}}{_LEFT})*"),
}  # fmt: skip
SPLITS = {name: rule for names, rule in _RULES.items() for name in names}
BEGINS_WITH_BOS = (  # unless the file sets add_bos_token
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"),
)
WHOLE_WORDS_FIRST = (*BEGINS_WITH_BOS, "glm4", "glm5", "minicpm5", "youtu")  # a word that is a token needs no merges
