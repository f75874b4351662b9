import json
import re
import shutil
import subprocess

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from testing_utils import make_tiny_model, make_trainer
from testing_utils.trainings import assert_equal
from trl_qarl.checkpoint import relay as relay_module
from trl_qarl.checkpoint.cards import PLOT_FILE
from trl_qarl.checkpoint.export import checkpoint_state_dict, export_checkpoint
from trl_qarl.checkpoint.marker import begin, complete
from trl_qarl.checkpoint.relay import Relay, rebuild
from trl_qarl.cli import main
from trl_qarl.quantization.swap import prepare_model


def files_of(folder):
    """Content of every file by its name, but for the page that says how the training went."""
    return {
        p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name not in ("README.md", PLOT_FILE)
    }


class ExportsEachStep(TrainerCallback):
    """Exports the policy before the first update and after each."""

    def __init__(self, folder):
        self.folder, self.trainer = folder, None

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.export_model(self.folder / str(state.global_step))

    on_train_end = on_step_begin


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training of two generation batches, at 4 and at 3 bits, which is resumed in its middle once it has ended."""
    folder = tmp_path_factory.mktemp("relay")
    model = make_tiny_model(folder, "llama")

    def train(name, resume=None):
        exports = ExportsEachStep(folder / name)
        options = {"precisions": [4, 3], "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
        trainer = make_trainer(
            model, folder / "out", callbacks=[exports], publish_dir=str(folder / "relay"), **options
        )
        exports.trainer = trainer
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    train("whole")
    shutil.copytree(folder / "relay", folder / "relay of the whole")
    train("resumed", str(folder / "out" / "checkpoint-2"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("relay", "exports"), [("relay of the whole", "whole"), ("relay", "resumed")])
def test_any_version_is_rebuilt_byte_for_byte(run, tmp_path, capsys, relay, exports):
    versions = [entry["version"] for entry in json.loads((run / relay / "manifest.json").read_text())["versions"]]
    assert versions == [0, 2, 4]
    rebuilt = {}
    for version in versions:
        command = ["export", "--from_patches", str(run / relay), "--version", str(version)]
        assert main([*command, "--output_dir", str(tmp_path / str(version))]) == 0
        assert f"Version {version} written to" in capsys.readouterr().out
        rebuilt[version] = files_of(tmp_path / str(version))
        if (run / exports / str(version)).exists():
            assert rebuilt[version] == files_of(run / exports / str(version))
    assert len({files["model.safetensors"] for files in rebuilt.values()}) == 3
    assert rebuild(run / relay, tmp_path / "last") == 4 and files_of(tmp_path / "last") == rebuilt[4]
    # Before the resumed run there was an update 4 as well. No folder holds a base twice.
    assert [path.name for path in sorted((run / relay).iterdir()) if path.is_dir()] == ["base-0"]


@pytest.mark.slow
def test_a_folder_of_another_run_is_refused_before_anything_is_trained(run, tmp_path):
    manifest = (run / "relay" / "manifest.json").read_text()
    model = make_tiny_model(tmp_path, "llama")
    trainer = make_trainer(model, run / "out", publish_dir=str(run / "relay"))
    with pytest.raises(ValueError, match=r"holds versions of run 'out-\w+', and this is a new run, 'out-"):
        trainer.train()
    with pytest.raises(ValueError, match=r"this is run 'elsewhere-\w+'. Choose an empty folder, or resume that run"):
        Relay(run / "relay", tmp_path / "elsewhere", 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights.bin").touch()
    with pytest.raises(ValueError, match="'weights.bin'"):
        Relay(tmp_path / "other", tmp_path)
    relay = Relay(run / "relay", run / "out", 4)
    changed = {name: t + 1 for name, t in load_file(run / "resumed" / "4" / "model.safetensors").items()}
    with pytest.raises(ValueError, match="has version 4 with other weights"):
        relay.write(4, changed, None)
    relay.close()
    assert (run / "relay" / "manifest.json").read_text() == manifest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--version", "3"], r"has no version 3; it has \[0, 2, 4\]"),
        (["--scheme", "w8a8", "--bits", "3"], "given with --scheme, --bits"),
    ],
)
def test_what_a_version_cannot_be_is_refused(run, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        main(["export", "--from_patches", str(run / "relay"), "--output_dir", str(tmp_path / "out"), *options])
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def policy(version):
    """Tensors of a policy of two layers after so many updates."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(-(2**31), 2**31, (40, 40), dtype=torch.int32, generator=draw)
    tensors = {f"layers.{layer}.q.weight_packed": codes.clone() for layer in range(2)}
    for tensor in tensors.values():
        tensor.view(-1)[: 10 * version] ^= 1 << 13
    norm = torch.randn(64, generator=draw.manual_seed(version)).bfloat16()
    return tensors | {"norm.weight": norm, "frozen": torch.ones(3, dtype=torch.float16)}


def write(relay, *versions):
    """Write versions and close the relay."""

    def export(folder, version):
        folder.mkdir()
        save_file(policy(version), folder / "model.safetensors")

    for version in versions:
        relay.write(version, policy(version), lambda folder, version=version: export(folder, version))
    relay.close()


def rebuilt(folder, output_dir, version=None):
    version = rebuild(folder, output_dir, version)
    assert_equal(load_file(output_dir / "model.safetensors"), policy(version))
    # It may be written over, as any folder that is given again.
    shutil.rmtree(output_dir)
    return version


@pytest.fixture
def written(tmp_path):
    write(Relay(tmp_path / "relay", tmp_path / "run"), 0, 1, 1, 2, 3)
    return tmp_path / "relay"


def test_only_changes_are_written(written, tmp_path):
    assert [rebuilt(written, tmp_path / "out", version) for version in (0, 1, 2, 3, None)] == [0, 1, 2, 3, 3]
    patch = load_file(written / "patch-2.safetensors")
    assert sorted(patch) == ["norm.weight", "qarl.delta.layers.0", "qarl.delta.layers.1"]
    assert patch["qarl.delta.layers.0"].nbytes < 400


def test_weights_that_change_between_two_updates_come_with_the_next_version(tmp_path):
    relay = Relay(tmp_path / "relay", tmp_path / "run")
    relay.write(0, policy(0), lambda folder: (folder.mkdir(), save_file(policy(0), folder / "model.safetensors")))
    # As by a callback after an evaluation.
    relay.write(0, policy(5), None)
    write(relay, 1, 2)
    assert [rebuilt(tmp_path / "relay", tmp_path / "out", version) for version in (0, 1, 2)] == [0, 1, 2]


def test_two_trainers_do_not_share_a_folder(written, tmp_path):
    relay = Relay(written, tmp_path / "run", 3)
    with pytest.raises(ValueError, match=r"belongs to process \d+ on .*, which is still training"):
        Relay(written, tmp_path / "run", 3)
    relay.close()
    # What a trainer leaves that is killed while it writes.
    (written / ".partial").mkdir()
    (written / ".partial" / "patch-4.safetensors").write_bytes(b"half")
    write(Relay(written, tmp_path / "run", 3), 3, 4)
    assert rebuilt(written, tmp_path / "out") == 4


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"mounting a file system needs root: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no `mount`")
def test_training_goes_on_wherever_in_an_export_the_disk_is_full(small_disk, tmp_path, caplog):
    """The tokenizer is written in Rust, whose error for a full disk is a plain `Exception`."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, "llama"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llama")
    prepare_model(model, "w4a16", scale_dtype=torch.float32)
    tensors = checkpoint_state_dict(model, torch.float32)

    def export(folder):
        export_checkpoint(model, folder, tokenizer, torch.float32)

    relay, filler, failed = Relay(small_disk / "relay", tmp_path / "run"), small_disk / "filler", []
    for version, free in enumerate(range(0, 64, 4)):
        filler.write_bytes(b"")
        filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - free * 1024))
        relay.write(version, tensors, export)
        assert not (small_disk / "relay" / "manifest.json").exists()
        assert f"Version {version} could not be written" in caplog.text
        failed.append(type(caplog.records[-1].args[2]))
        caplog.clear()
    # In the configuration, in the tokenizer, in the weights.
    assert list(dict.fromkeys(failed)) == [OSError, Exception, SafetensorError]
    filler.unlink()
    relay.write(16, tensors, export)
    relay.close()
    assert rebuild(small_disk / "relay", tmp_path / "out") == 16
    export(tmp_path / "export")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "export")


def test_an_export_that_is_wrong_is_an_error(tmp_path):
    def export(folder):
        raise ValueError("It cannot be exported.")

    relay = Relay(tmp_path / "relay", tmp_path / "run")
    with pytest.raises(ValueError, match="cannot be exported"):
        relay.write(0, policy(0), export)
    relay.close()


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(written, tmp_path, caplog):
    with pytest.raises(ValueError, match="holds versions of run 'run-"):
        Relay(written, tmp_path / "elsewhere")
    relay = Relay(written, tmp_path / "run")
    assert "versions [0, 1, 2, 3] were written by this run before its first checkpoint and are dropped" in caplog.text
    assert not any(path.name.startswith(("base-", "patch-")) for path in written.iterdir())
    write(relay, 0, 1)
    assert rebuilt(written, tmp_path / "out") == 1
    # Once there is a checkpoint, there is a way to go on.
    checkpoint = tmp_path / "run" / "checkpoint-1"
    begin(checkpoint)
    Relay(written, tmp_path / "run").close()
    write(Relay(written, tmp_path / "run"), 0)
    complete(checkpoint)
    with pytest.raises(ValueError, match="this is a new run"):
        Relay(written, tmp_path / "run")
    assert rebuilt(written, tmp_path / "out") == 0


def test_a_run_that_goes_on_between_two_versions_writes_a_base(written, tmp_path, caplog):
    """The weights at that update are unknown, so the chain continues with a base."""
    relay = Relay(written, tmp_path / "run", 2)
    assert "versions [3] are after update 2" in caplog.text and not (written / "patch-3.safetensors").exists()
    write(relay, 4, 5)
    assert [rebuilt(written, tmp_path / "out", version) for version in (2, 4, 5)] == [2, 4, 5]
    entries = json.loads((written / "manifest.json").read_text())["versions"]
    assert list(entries[3]["files"]) == ["base-4/model.safetensors"] and entries[3]["parent"]


def sign(folder):
    """Make a chain of whatever is there, as somebody would who knows how."""

    def chain(versions):
        parent = ""
        for entry in versions:
            entry["files"] = {name: relay_module._sha256(folder / name) for name in entry["files"]}
            entry["parent"] = parent
            parent = relay_module._sha256_of_entry(entry)

    edit(folder, chain)


def swap(folder, one, other):
    content = [(folder / f"patch-{n}.safetensors").read_bytes() for n in (one, other)]
    for number, data in zip((other, one), content, strict=True):
        (folder / f"patch-{number}.safetensors").write_bytes(data)


def take_from_another_run(folder):
    """A patch for tensors that this run never had, under the name of its own."""
    changed = {name: tensor + 1 if "packed" in name else tensor for name, tensor in policy(1).items()}
    other = Relay(folder.parent / "other", folder.parent / "elsewhere")
    other.write(1, changed, lambda partial: partial.mkdir())
    other.write(2, policy(2), None)
    other.close()
    shutil.copyfile(folder.parent / "other" / "patch-2.safetensors", folder / "patch-2.safetensors")


def flip_bit(path, at=-14):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def edit(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest["versions"])
    (folder / "manifest.json").write_text(json.dumps(manifest))


DAMAGE = {
    "cut": lambda f: (f / "patch-2.safetensors").write_bytes((f / "patch-2.safetensors").read_bytes()[:-1]),
    "bit flipped": lambda f: flip_bit(f / "patch-2.safetensors"),
    "bit of the base flipped": lambda f: flip_bit(f / "base-0" / "model.safetensors", 2000),
    "missing": lambda f: (f / "patch-2.safetensors").unlink(),
    "out of order": lambda f: swap(f, 1, 2),
    "of another run": take_from_another_run,
    "applied twice": lambda f: shutil.copyfile(f / "patch-1.safetensors", f / "patch-2.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("is_signed", [False, True], ids=["as it is", "signed again"])
def test_files_that_are_not_what_was_written_are_named(written, tmp_path, damage, is_signed):
    DAMAGE[damage](written)
    named = "base-0/model" if "base" in damage else "patch-1" if damage == "out of order" else "patch-2"
    message = f"{named}.safetensors is missing, or does not match manifest.json"
    if is_signed and damage != "missing":
        sign(written)
        # Hashes say nothing now. What changes are for does, and what comes of all of them.
        message = "damaged|changes are for|other weights"
        if damage == "cut":
            message = "patch-2.safetensors: .*incomplete metadata"
    with pytest.raises(ValueError, match=message):
        rebuild(written, tmp_path / "out", 2)
    assert not any((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.insert(2, v.pop(1)), "version 2 does not follow the one before it"),
        (lambda v: v.pop(1), "version 2 does not follow the one before it"),
        (lambda v: v[0].update(weights="0"), "version 1 does not follow the one before it"),
        (lambda v: v[1].update(files={"../x": "0"}), "are not all in the folder"),
        (lambda v: v[1].pop("parent"), "'parent'"),
        (
            lambda v: (v.pop(0), v[0].update(parent=""), v.__delitem__(slice(1, None))),
            "manifest.json: no version up to 1",
        ),
    ],
)
def test_a_manifest_that_is_no_chain_is_refused(written, tmp_path, change, message):
    edit(written, change)
    with pytest.raises(ValueError, match=message):
        rebuild(written, tmp_path / "out")


def test_a_folder_without_versions_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`publish_dir`"):
        rebuild(tmp_path, tmp_path / "out")
