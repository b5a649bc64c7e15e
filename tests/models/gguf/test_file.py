"""Headers of GGUF files are those that the package `gguf` writes; one that is broken anywhere is refused in a line."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.conf.errors import ConfigError
from gapless.models.gguf.config import config_values
from gapless.models.gguf.file import GgufFile, TensorPlace


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("two words, 日本")
    writer.add_uint64("count", 2**40)
    writer.add_bool("flag", True)
    writer.add_float32("share", 0.5)
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_fields_and_tensors_are_those_that_were_written(file: Path) -> None:
    found = GgufFile(file)
    assert found.get("general.name") == "two words, 日本"
    assert found.get("nothing", 7) == 7
    expected = {"count": 2**40, "flag": True, "share": 0.5, "texts": ["a", "", "ü"], "numbers": [1, 2, 3]}
    assert {key: found.get(key) for key in expected} == expected
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert found.tensors == {
        "matrix": TensorPlace((3, 4), 0, reader["matrix"].data_offset, file),
        "vector": TensorPlace((5,), 0, reader["vector"].data_offset, file),
    }


def test_tensors_begin_at_the_alignment_wherever_the_header_ends(tmp_path: Path) -> None:
    """A header of each length, so that one ends at the alignment itself."""
    values = np.arange(5, dtype=np.float32)
    for alignment in (8, 32):
        for length in range(alignment):
            path = tmp_path / f"{alignment}-{length}.gguf"
            writer = gguf.GGUFWriter(path, "llama")
            writer.add_custom_alignment(alignment)
            writer.add_string("filler", "x" * length)
            writer.add_tensor("vector", values)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            place = GgufFile(path).tensors["vector"]
            assert np.array_equal(np.fromfile(path, "<f4", 5, offset=place.offset), values), (alignment, length)


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [(0, "111111"), (1, "000000"), (2, "101010"), (3, "110110"), (6, "111110"), ([True, False] * 3, "101010")],
)
def test_a_pattern_of_windows_is_a_run_s_length_or_a_flag_a_layer(
    pattern: int | list[bool], windows: str, tmp_path: Path
) -> None:
    """In llama.cpp all layers of a run of so many have a window but the last; 0: all layers."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    sizes = {"block_count": 6, "embedding_length": 64, "feed_forward_length": 64, "context_length": 128}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16}
    for key, value in (sizes | {"attention.sliding_window": 32}).items():
        writer.add_uint32(f"gemma3.{key}", value)
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
    if isinstance(pattern, int):
        writer.add_uint32("gemma3.attention.sliding_window_pattern", pattern)
    else:
        writer.add_array("gemma3.attention.sliding_window_pattern", pattern)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    kinds = {"sliding_attention": "1", "full_attention": "0"}
    assert "".join(kinds[each] for each in config_values(GgufFile(path))["layer_types"]) == windows


@given(data=st.data())
def test_a_header_with_a_broken_byte_or_end_is_read_or_refused(
    data: st.DataObject, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    broken = tmp_path_factory.getbasetemp() / "broken.gguf"
    broken.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    said = None
    try:
        GgufFile(broken)
    except ConfigError as error:
        said = str(error)
    assert said is None or said.startswith(f"{broken}: not a readable GGUF file (")
    assert "\n" not in (said or "")


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ConfigError, match=r"not a readable GGUF file \(it begins with b'PK"):
        GgufFile(file)
    file.write_bytes(b"GGUF\x00\x00\x00\x03" + bytes(100))
    with pytest.raises(ConfigError, match="big-endian; convert it: python -m gguf"):
        GgufFile(file)


def test_a_big_endian_file_is_called_so(file: Path, tmp_path: Path) -> None:
    swapped = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(swapped, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"big-endian; convert it: python -m gguf.scripts.gguf_convert_endian"):
        GgufFile(swapped)
