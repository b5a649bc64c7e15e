"""A model that is split into several GGUF files is that of one file, and what its parts lack is named in a line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from gapless.conf.errors import ConfigError
from gapless.conf.schema import ModelConfig
from gapless.models.checkpoint import Checkpoint
from gapless.models.find_weights import find_weights
from gapless.models.gguf.file import open_gguf
from gapless.models.layout import tensor_shapes
from tests.models.gguf.test_weights import WIDE, model_of
from tests.support.gguf_files import write_gguf


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a model as one file, and in parts of eight tensors."""
    model, folder = model_of(transformers.LlamaConfig(**WIDE)), tmp_path_factory.mktemp("whole")
    parts = tmp_path_factory.mktemp("parts")
    write_gguf(parts / "model.gguf", model, per_part=8)
    return write_gguf(folder / "model.gguf", model), parts


@pytest.fixture
def parts(made: tuple[Path, Path], tmp_path: Path) -> list[Path]:
    return sorted(shutil.copytree(made[1], tmp_path / "model").iterdir())


def checked(path: Path) -> Any:
    model = ModelConfig(weights=str(path))
    arch, found = Checkpoint.open(model).arch, find_weights(model)
    assert found is not None
    source = Checkpoint.open(ModelConfig(weights=str(found))).tensors(arch)
    source.check(arch, tensor_shapes(arch))
    return arch, source


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_any_part_or_the_folder_is_the_whole_model(made: tuple[Path, Path], parts: list[Path]) -> None:
    arch, expected = checked(made[0])
    assert [part.name for part in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for given in (*parts, parts[0].parent):
        own, source = checked(given)
        assert own == arch
        for name, shape in tensor_shapes(arch).items():
            at = [slice(0, size) for size in (*shape, None)[:2]] if len(shape) == 2 else [slice(0, shape[0]), None]
            assert torch.equal(source.read(name, *at), expected.read(name, *at)), name


def test_a_part_that_is_missing(parts: list[Path]) -> None:
    first, second, third = parts
    second.unlink()
    for given, name in ((third, third.name), (first.parent, first.name)):
        assert refusal(given) == f"{second}: missing; {name} is one of 3 parts of a model"
    first.unlink()
    for given in (third, first.parent):
        assert refusal(given) == f"{first}: missing; {third.name} is one of 3 parts of a model"


def test_a_part_that_does_not_belong(parts: list[Path], tmp_path: Path) -> None:
    shutil.copy(parts[2], parts[1])
    by_name = "part 2 of 3 by its name, as in NAME-00001-of-00003.gguf"
    assert refusal(parts[0]) == f"{parts[1]}: split.no=2 and split.count=3, but {by_name}"
    alone = Path(shutil.copy(parts[0], tmp_path / "alone.gguf"))
    assert refusal(alone) == (
        f"{alone}: split.no=0 and split.count=3, but part 1 of 1 by its name, as in NAME-00001-of-00003.gguf"
    )


def test_a_part_with_other_tensors(parts: list[Path]) -> None:
    whole = open_gguf(parts[0])
    total = whole.get("split.tensors.count")
    others = sum(place.path != parts[1] for place in whole.tensors.values())
    said = {
        "something": f"{parts[0]}: split.tensors.count={total}, but its parts hold {others + 1} tensors",
        "token_embd.weight": f"{parts[1]}: tensor token_embd.weight is in {parts[0].name} too",
    }
    for name, expected in said.items():
        writer = gguf.GGUFWriter(parts[1], "llama")
        writer.add_uint16("split.no", 1)
        writer.add_uint16("split.count", 3)
        writer.add_tensor(name, np.ones(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert refusal(parts[0]) == expected


def test_a_part_that_is_cut_short(parts: list[Path]) -> None:
    whole = parts[1].read_bytes()
    parts[1].write_bytes(whole[:-100])
    said = refusal(parts[2])
    assert said.startswith(f"{parts[1]}: tensor blk.")
    assert said.endswith(" lies beyond the end of the file; is it cut short?")
    parts[1].write_bytes(whole[:100])
    assert refusal(parts[0]) == f"{parts[1]}: not a readable GGUF file (it ends within its header)"


def test_a_folder_of_two_models(parts: list[Path]) -> None:
    folder = parts[0].parent
    shutil.copy(parts[0], folder / "other-00001-of-00002.gguf")
    key = f"model.weights={folder}"
    said = "several GGUF files; give one of model-00001-of-00003.gguf, other-00001-of-00002.gguf"
    assert refusal(folder) == f"{key}: {said}"
