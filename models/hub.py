"""Finds models of the Hugging Face Hub by name: in the cache of `huggingface_hub`, else they are fetched into it.

Its environment variables hold: HF_HOME or HF_HUB_CACHE (where the cache lies), HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..conf.errors import ConfigError

TEXTS = ("*.json", "*.jinja", "merges.txt")
_TENSORS = ("*.safetensors",)
_ELSEWHERE = ("original/*", "*/*.safetensors", "consolidated*.safetensors")  # the same weights in other forms


@cache
def snapshot(name: str, revision: str | None, *, tensors: bool = True) -> Path:
    """Return the folder of a model's snapshot. Only files that are read are fetched, with a progress bar each.

    Args:
        name: `ORGANISATION/MODEL`.
        revision: a branch, tag or commit; None for the main branch.
        tensors: fetch the weights too; a simulation needs config.json alone.

    Raises:
        ConfigError: there is no such model or revision, it may not be read, or the hub does not answer and the cache
            does not hold it.
    """
    from huggingface_hub import constants, errors, snapshot_download

    key = f"model.weights={name}" + (f" model.revision={revision}" if revision else "")
    patterns = [*TEXTS, *(_TENSORS if tensors else ())]
    try:
        found = snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=list(_ELSEWHERE))
    except errors.GatedRepoError:
        raise ConfigError(f"{key}: its owners ask for consent; give it on the hub, and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{key}: no such folder, and no such model on the hub (a private one needs HF_TOKEN)"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{key}: the model has no such revision") from None
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
        why = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError(
            f"{key}: no such folder, not in the cache {constants.HF_HUB_CACHE}, and the hub gives none ({why})"
        ) from error
    return Path(found)


def of_cache_folder(folder: Path) -> Path:
    """Return the newest snapshot in a model's folder of the cache, or in the `snapshots` there; else the folder.

    Such a folder is called `models--ORGANISATION--MODEL`.

    Raises:
        ConfigError: the folder names no snapshot that it holds.
    """
    snapshots = folder if folder.name == "snapshots" else folder / "snapshots"
    if not snapshots.is_dir():
        return folder
    reference = snapshots.parent / "refs" / "main"
    names = [reference.read_text().strip()] if reference.is_file() else [each.name for each in snapshots.iterdir()]
    if len(names) != 1 or not (snapshots / names[0]).is_dir():
        raise ConfigError(f"model.weights={folder}: give one of the folders in {snapshots}")
    return snapshots / names[0]
