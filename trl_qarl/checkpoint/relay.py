"""
Writes the policies of a training to files for object storage: the first one whole, then the changes of each version.

docs/publish_and_serve.md has the table of files. Patches contain blocks of [`trl_qarl.wire.delta`], or whole tensors
where those are shorter. The writing trainer holds `lock`.

A file gets its name when it is complete, and only then is added to the manifest: if a trainer is killed or the disk is
full, all versions in the manifest can still be read. Each entry has the digest of the previous one, so a reader
notices if earlier versions were replaced.
"""

import hashlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from itertools import groupby, pairwise, starmap
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..quantization.names import layer_of
from ..wire.delta import DELTA_PREFIX, base_digest, elements, is_delta
from ..wire.fingerprint import fingerprint
from ..wire.patches import PatchBook
from .export import check_export_dir, read_header, written_as_a_whole
from .files import allow_as_umask, hold, is_of_the_disk
from .marker import sync
from .record import last_complete_checkpoint


LOCK_FILE = "lock"
MANIFEST_FILE = "manifest.json"
_PARTIAL = ".partial"

logger = logging.getLogger(__name__)


class Relay:
    """
    Writer of the folder of a run during training. It holds the last version, as large as an export, in host memory.

    `output_dir` identifies the run. Versions after update `resumed_at`, at which the run is resumed, are dropped. A
    run that starts again without a complete checkpoint drops all versions. `ValueError` is raised if another trainer
    writes to the folder, or if the folder holds another run or other files.
    """

    def __init__(self, folder: str | Path, output_dir: str | Path, resumed_at: int | None = None):
        self._folder, self._output_dir = Path(folder), Path(output_dir)
        path = self._output_dir.resolve()
        digest = hashlib.sha256(f"{socket.gethostname()}:{path}".encode()).hexdigest()
        self._run = f"{path.name}-{digest[:8]}"
        self._held = PatchBook()
        self._lock = hold(self._folder / LOCK_FILE, "publish_dir")
        # Left by a trainer that was killed while writing.
        _remove(self._folder / _PARTIAL)
        try:
            self._versions = self._go_on(resumed_at)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder."""
        self._lock.close()

    def _go_on(self, resumed_at: int | None) -> list[dict[str, Any]]:
        if not (self._folder / MANIFEST_FILE).exists():
            names = sorted(path.name for path in self._folder.iterdir() if path.name != LOCK_FILE)
            # Ignore files of a trainer that ended before its first version was complete.
            others = [name for name in names if not name.startswith("base-") and not name.endswith(_PARTIAL)]
            if others:
                raise ValueError(
                    f"publish_dir={str(self._folder)!r} holds {others[:3]} and no {MANIFEST_FILE}. Choose an empty folder."
                )
            return []
        manifest = _read_manifest(self._folder)
        is_ours = manifest["run"] == self._run
        is_begun_again = is_ours and resumed_at is None and last_complete_checkpoint(self._output_dir) is None
        if is_begun_again:
            resumed_at = -1
        if not is_ours or resumed_at is None:
            now = f"run {self._run!r}" if resumed_at is not None else f"a new run, {self._run!r}"
            raise ValueError(
                f"publish_dir={str(self._folder)!r} holds versions of run {manifest['run']!r}, and this is {now}. Choose an empty "
                "folder, or resume that run, with the same output_dir."
            )
        kept = [entry for entry in manifest["versions"] if entry["version"] <= resumed_at]
        if dropped := manifest["versions"][len(kept) :]:
            after = f"are after update {resumed_at}, from which the run continues,"
            reason = "were written by this run before its first checkpoint" if is_begun_again else after
            versions = [entry["version"] for entry in dropped]
            logger.warning("%s: versions %s %s and are dropped.", self._folder, versions, reason)
            self._write_manifest(kept)
            for name in {Path(file).parts[0] for entry in dropped for file in entry["files"]}:
                _remove(self._folder / name)
        return kept

    def write(self, version: int, tensors: Mapping[str, torch.Tensor], export: Callable[[Path], Any]) -> None:
        """
        Add `version`, the number of updates done, unless it is the last one already. A disk error is logged, and the
        next version includes the changes.

        `tensors` is the low-bit policy under its names in a checkpoint, on the CPU; `export` writes an export with
        these tensors to a folder. `ValueError` is raised if the version exists with other weights.
        """
        fingerprints = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        weights = base_digest(fingerprints)
        if is_removed := not (self._folder / MANIFEST_FILE).exists() and not (self._folder / LOCK_FILE).exists():
            # Start again with a base.
            self._versions, self._held = [], PatchBook()
        last = self._versions[-1] if self._versions else None
        if last is not None and last["version"] == version:
            if self._held.tensors:
                # The next patch begins with the tensors that were written.
                return
            if last["weights"] != weights:
                raise ValueError(
                    f"publish_dir={str(self._folder)!r} has version {version} with other weights than those from which this run "
                    "continues: it belongs to another run. Choose an empty folder."
                )
        else:
            try:
                if is_removed:
                    logger.warning("%s was removed; it is created again.", self._folder)
                    self.close()
                    self._lock = hold(self._folder / LOCK_FILE, "publish_dir")
                is_known = tensors.keys() == self._held.tensors.keys() and all(
                    starmap(self._held.holds, tensors.items())
                )
                files = self._patch(version, tensors, fingerprints) if is_known else self._base(version, export)
                parent = "" if last is None else _sha256_of_entry(last)
                entry = {"version": version, "files": files, "weights": weights, "parent": parent}
                self._write_manifest([*self._versions, entry])
            except Exception as error:
                if not is_of_the_disk(error):
                    raise
                message = (
                    "Version %d could not be written to %s (%s). The last readable version is %s; its changes are written "
                    "with the next one."
                )
                readable = "none" if last is None else last["version"]
                logger.error(message, version, self._folder, error, readable)
                return
            finally:
                _remove(self._folder / _PARTIAL)
            self._versions.append(entry)
        before = self._held.fingerprints
        self._held.confirm(fingerprints)
        for name, tensor in tensors.items():
            if fingerprints[name] != before.get(name):
                self._held.keep(name, tensor)

    def _patch(self, version: int, tensors: Mapping[str, torch.Tensor], fingerprints: Mapping[str, str]) -> dict:
        changed = [name for name in tensors if fingerprints[name] != self._held.fingerprints[name]]
        sent: dict[str, torch.Tensor] = {}
        for layer, names in groupby(sorted(changed, key=layer_of), key=layer_of):
            block, whole = self._held.make({name: tensors[name] for name in names})
            sent |= {name: tensors[name] for name in whole}
            if block is not None:
                sent[f"{DELTA_PREFIX}{layer}"] = block
        partial = self._folder / _PARTIAL
        partial.mkdir()
        name = f"patch-{version}.safetensors"
        save_file(sent, partial / name)
        allow_as_umask([partial / name])
        sync(partial)
        os.replace(partial / name, self._folder / name)
        return {name: _sha256(self._folder / name)}

    def _base(self, version: int, export: Callable[[Path], Any]) -> dict[str, str]:
        name = f"base-{version}"
        export(self._folder / _PARTIAL)
        sync(self._folder / _PARTIAL)
        # Left by a trainer that ended before the manifest named it.
        _remove(self._folder / name)
        os.replace(self._folder / _PARTIAL, self._folder / name)
        files = sorted(path for path in (self._folder / name).rglob("*") if path.is_file())
        return {path.relative_to(self._folder).as_posix(): _sha256(path) for path in files}

    def _write_manifest(self, versions: list[dict[str, Any]]) -> None:
        partial = self._folder / f"{MANIFEST_FILE}{_PARTIAL}"
        try:
            with partial.open("w", encoding="utf-8") as file:
                json.dump({"run": self._run, "versions": versions}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._folder / MANIFEST_FILE)
        finally:
            partial.unlink(missing_ok=True)


def rebuild(folder: str | Path, output_dir: str | Path, version: int | None = None) -> int:
    """
    Write the export of a version, by default the last, and return its number, the updates done. All files except
    README.md, which is the base's, equal the original export byte for byte. `folder` was written by a [`Relay`], or is
    a copy of such a folder; `output_dir` is as for [`export_checkpoint`].

    `ValueError` is raised if there is no such version, and names a missing or damaged file, or one of another version.
    """
    folder = Path(folder)
    entries = _read_manifest(folder)["versions"]
    for before, entry in pairwise([None, *entries]):
        if entry["parent"] != ("" if before is None else _sha256_of_entry(before)):
            raise ValueError(
                f"{folder / MANIFEST_FILE}: version {entry['version']} does not follow the one before it. Copy it again."
            )
    numbers = [entry["version"] for entry in entries]
    if not entries or (version is not None and version not in numbers):
        raise ValueError(f"{folder} has no version {version}; it has {numbers}.")
    entries = entries if version is None else entries[: numbers.index(version) + 1]
    start = max((index for index, entry in enumerate(entries) if _base_folder(entry)), default=None)
    if start is None:
        raise ValueError(
            f"{folder / MANIFEST_FILE}: no version up to {entries[-1]['version']} is whole. Copy the folder again."
        )
    base, *patches = entries[start:]
    check_export_dir(output_dir)
    for entry in (base, *patches):
        for name, digest in entry["files"].items():
            if not (folder / name).is_file() or _sha256(folder / name) != digest:
                raise ValueError(f"{folder / name} is missing, or does not match {MANIFEST_FILE}. Copy it again.")
    with written_as_a_whole(Path(output_dir)) as partial:
        shutil.copytree(folder / _base_folder(base), partial, dirs_exist_ok=True)
        held = PatchBook()
        for path in partial.glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                held.keep(name, tensor)
        fingerprints = {name: fingerprint(tensor) for name, tensor in held.tensors.items()}
        for entry in patches:
            for name in entry["files"]:
                try:
                    patch = load_file(folder / name)
                    if others := [n for n, t in patch.items() if not is_delta(n) and not held.holds(n, t)]:
                        raise ValueError(
                            f"{others[0]} is not in the version before, or has another shape or dtype there."
                        )
                    for changed, tensor in held.take(patch.items(), fingerprints):
                        fingerprints[changed] = fingerprint(tensor)
                except (RuntimeError, ValueError, SafetensorError) as error:
                    raise ValueError(f"{folder / name}: {error}") from error
        if base_digest(fingerprints) != entries[-1]["weights"]:
            raise ValueError(f"{folder}: rebuilding version {entries[-1]['version']} gave other weights.")
        for path in partial.glob("*.safetensors"):
            with path.open("r+b") as file:
                size, header = read_header(file)
                for name in header.keys() - {"__metadata__"}:
                    file.seek(8 + size + header[name]["data_offsets"][0])
                    file.write(elements(held.tensors[name].contiguous()).tobytes())
    return entries[-1]["version"]


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        for entry in manifest["versions"]:
            int(entry["version"]), str(entry["weights"]), str(entry["parent"])
            # Files must not be outside of the folder.
            if any(Path(name).is_absolute() or ".." in Path(name).parts for name in entry["files"]):
                raise ValueError(f"{sorted(entry['files'])} are not all in the folder.")
        str(manifest["run"])
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no {MANIFEST_FILE}: it is not a folder of `publish_dir`.") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}). Copy it again.") from error
    return manifest


def _base_folder(entry: Mapping[str, Any]) -> str:
    """Return the folder of a complete version; the empty string for a patch."""
    name = f"base-{entry['version']}"
    return name if all(Path(file).parts[0] == name for file in entry["files"]) else ""


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sha256_of_entry(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
