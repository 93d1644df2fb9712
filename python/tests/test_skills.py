"""`adze skills` and `python -m adze skills`: the same files, checked by their sums, never overwritten unasked."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = {"program": [ROOT / "build/adze"], "python": [sys.executable, "-m", "adze"]}


class Skills:
    def __init__(self, command, folder):
        self.command, self.folder = command, folder

    def __call__(self, *arguments, status=0):
        env = {**os.environ, "HOME": str(self.folder / "home"), "PYTHONPATH": str(ROOT / "python")}
        env.pop("XDG_CONFIG_HOME", None)
        done = subprocess.run(
            [*self.command, "skills", *arguments], cwd=self.folder, env=env, capture_output=True, errors="replace"
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(params=PROGRAMS)
def skills(request, tmp_path):
    return Skills(PROGRAMS[request.param], tmp_path)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_both_write_the_same(tmp_path):
    written = []
    for name, command in PROGRAMS.items():
        (tmp_path / name).mkdir()
        Skills(command, tmp_path / name)("add", "--claude")
        written.append(files(tmp_path / name / ".claude/skills/adze-kernels"))
    assert written[0] == written[1]
    assert {"SKILL.md", "MANIFEST", "references/kernel-templates.md"} <= set(written[0])
    assert any(path.startswith("scripts/") for path in written[0])


def test_sums_are_those_of_sha256sum(skills):
    skills("add", "--dest", "here")
    done = subprocess.run(
        ["sha256sum", "-c", "MANIFEST"], cwd=skills.folder / "here/adze-kernels", capture_output=True, text=True
    )
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout + done.stderr
    assert done.stdout.count(": OK") == len(files(skills.folder / "here/adze-kernels")) - 1


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode", "cursor"])
def test_places(skills, agent):
    skills("add", f"--{agent}")
    assert (skills.folder / f".{agent}/skills/adze-kernels/SKILL.md").exists()
    skills("add", f"--{agent}", "--global")
    home = skills.folder / "home" / (".config/opencode" if agent == "opencode" else f".{agent}")
    assert (home / "skills/adze-kernels/SKILL.md").exists()
    said = skills("list")
    assert re.search(r"^adze-kernels, of adze \d", said) and said.count("\n  in ") == 2


def test_nothing_is_overwritten_without_force(skills):
    skills("add", "--claude")
    guide = skills.folder / ".claude/skills/adze-kernels/SKILL.md"
    original = guide.read_text()
    skills("verify", "--claude")
    guide.write_text("mine")
    assert "SKILL.md was changed" in skills("verify", "--claude", status=1)
    assert "--force" in skills("add", "--claude", status=1)
    assert "--force" in skills("remove", "--claude", status=1)
    assert guide.read_text() == "mine"
    skills("add", "--claude", "--force")
    assert guide.read_text() == original
    (guide.parent / "references/kernel-templates.md").unlink()
    assert "kernel-templates.md is missing" in skills("verify", "--claude", status=1)


def test_a_file_of_that_name_without_a_manifest_stays(skills):
    guide = skills.folder / "here/adze-kernels/SKILL.md"
    guide.parent.mkdir(parents=True)
    guide.write_text("mine")
    assert "--force" in skills("add", "--dest", "here", status=1)
    assert files(skills.folder / "here") == {"adze-kernels/SKILL.md": b"mine"}


def test_removal_leaves_what_others_wrote(skills):
    skills("add", "--codex")
    folder = skills.folder / ".codex/skills/adze-kernels"
    (folder / "notes.md").write_text("mine")
    skills("remove", "--codex")
    assert files(folder) == {"notes.md": b"mine"}
    assert "is not installed" in skills("remove", "--codex", status=1)
    assert "is not installed" in skills("verify", "--codex", status=1)


def test_another_release_is_replaced_and_verified(skills):
    skills("add", "--claude")
    folder = skills.folder / ".claude/skills/adze-kernels"
    manifest = folder / "MANIFEST"
    lines = manifest.read_text().splitlines()
    (folder / "old.md").write_text("")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    manifest.write_text("\n".join(["# adze-kernels of adze 0.0.1", *lines[1:], f"{empty}  old.md"]) + "\n")
    assert "not the release of this" in skills("verify", "--claude", status=1)
    skills("add", "--claude")
    assert not (folder / "old.md").exists()
    skills("verify", "--claude")


def test_a_file_that_a_release_adds_does_not_overwrite_others(skills):
    skills("add", "--claude")
    folder = skills.folder / ".claude/skills/adze-kernels"
    manifest, guide = folder / "MANIFEST", folder / "SKILL.md"
    manifest.write_text("".join(line for line in manifest.open() if "  SKILL.md" not in line))
    skills("add", "--claude")  # the release's own text is no loss
    manifest.write_text("".join(line for line in manifest.open() if "  SKILL.md" not in line))
    guide.write_text("mine")
    assert "--force" in skills("add", "--claude", status=1) and guide.read_text() == "mine"
    skills("remove", "--claude")
    assert files(folder) == {"SKILL.md": b"mine"}


@pytest.mark.parametrize("text", [b"", b"\n", b"garbage", b"\xff\xfe", b"# adze-kernels of adze 0.0.1"])
def test_a_damaged_manifest(skills, text):
    skills("add", "--claude")
    manifest = skills.folder / ".claude/skills/adze-kernels/MANIFEST"
    manifest.write_bytes(text)
    said = skills("verify", "--claude", status=1)
    assert "not the release of this" in said and "Traceback" not in said
    skills("add", "--claude")
    skills("verify", "--claude")


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["add"], "a place is missing"),
        (["add", "nosuch", "--claude"], "no skill is called 'nosuch'"),
        (["add", "../x", "--claude"], "no skill is called"),
        (["add", "--dest", ""], "empty"),
        (["nosuch"], "nosuch"),
    ],
)
def test_refusals(skills, arguments, why):
    assert why in skills(*arguments, status=2)
    assert not list(skills.folder.rglob("SKILL.md"))


def test_a_folder_that_cannot_be_made(skills):
    (skills.folder / "file").write_text("mine")
    said = skills("add", "--dest", "file", status=1)
    assert "file/adze-kernels" in said and "cannot be written" in said and "Traceback" not in said
