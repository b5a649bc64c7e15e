"""Finds Hugging Face Hub models by name in the cache of `huggingface_hub`, or downloads them into it.

Its environment variables apply: HF_HOME or HF_HUB_CACHE (the cache folder), HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
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
    """Return the folder of a model's snapshot. Downloads only the files that are needed, with progress bars.

    Args:
        name: `ORGANISATION/MODEL`.
        revision: a branch, tag or commit; None for the main branch.
        tensors: download the weights too; a simulation needs only config.json.

    Raises:
        ConfigError: there is no such model or revision, access is denied, or the hub is unreachable and the model is
            not in the cache.
    """
    from huggingface_hub import constants, errors, snapshot_download

    key = f"model.weights={name}" + (f" model.revision={revision}" if revision else "")
    patterns = [*TEXTS, *(_TENSORS if tensors else ())]
    try:
        found = snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=list(_ELSEWHERE))
    except errors.GatedRepoError:
        raise ConfigError(f"{key}: a gated model; request access on the hub, and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{key}: no such folder, and no such model on the hub (a private one needs HF_TOKEN)"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{key}: the model has no such revision") from None
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
        why = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError(
            f"{key}: no such folder, not in the cache {constants.HF_HUB_CACHE}, and it cannot be downloaded from the "
            f"hub ({why})"
        ) from error
    return Path(found)


def of_cache_folder(folder: Path) -> Path:
    """Return the snapshot of a model's cache folder, or of its `snapshots` folder; any other folder is returned as is.

    Cache folders are named `models--ORGANISATION--MODEL`. `refs/main` names the snapshot, else there must be only one.

    Raises:
        ConfigError: the snapshot is ambiguous or missing.
    """
    snapshots = folder if folder.name == "snapshots" else folder / "snapshots"
    if not snapshots.is_dir():
        return folder
    reference = snapshots.parent / "refs" / "main"
    names = [reference.read_text().strip()] if reference.is_file() else [each.name for each in snapshots.iterdir()]
    if len(names) != 1 or not (snapshots / names[0]).is_dir():
        raise ConfigError(f"model.weights={folder}: give one of the folders in {snapshots}")
    return snapshots / names[0]
