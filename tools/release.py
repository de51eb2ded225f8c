"""Makes the tag of a release after checking that all files name the same version: `python -m ggjit.tools.release`.

    engine/__init__.py __version__ == CITATION.cff version == first heading of CHANGELOG.md -> tag v0.1.0

The tag holds the changes of the version.  It is made of what is committed, so what is built from it has that version.
"""
import pathlib
import re
import subprocess

# file: where its version stands
VERSIONS = {"engine/__init__.py": r'^__version__ = "(.+)"$', "CITATION.cff": r"^version: (.+)$",
            "CHANGELOG.md": r"^## (\S+)"}


def version_of(root):
    """The version that all files of a checkout name; SystemExit where they differ or it is none."""
    found = {file: re.search(pattern, (root / file).read_text("utf-8"), re.M) for file, pattern in VERSIONS.items()}
    found = {file: match[1] if match else None for file, match in found.items()}
    version, *others = set(found.values())
    if others or not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version or ""):
        raise SystemExit("release: these must name one version, like 1.2.3 or 1.2.3rc1: "
                         + ", ".join(f"{file} {v}" for file, v in found.items()))
    return version


def changes_of(root, version):
    """The section of CHANGELOG.md about a version."""
    log = (root / "CHANGELOG.md").read_text("utf-8")
    text = re.search(rf"^## {re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)", log, re.M | re.S)[1].strip()
    if not text:
        raise SystemExit(f"release: CHANGELOG.md says nothing about {version}; write what changed")
    return text


def git(root, *arguments):
    """What git prints; SystemExit with its words where it fails."""
    done = subprocess.run(["git", "-C", root, *arguments], text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"release: git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def release(root):
    """Make the tag of the checkout at `root`; its name."""
    version = version_of(root)
    changes, tag = changes_of(root, version), f"v{version}"
    if git(root, "status", "--porcelain"):
        raise SystemExit("release: there are changes that are not committed; commit them first")
    if git(root, "tag", "--list", tag):
        raise SystemExit(f"release: {tag} exists; set the next version in {', '.join(VERSIONS)}")
    git(root, "tag", "--annotate", "--cleanup=verbatim", tag, "--message", f"ggjit {version}\n\n{changes}\n")
    return tag


if __name__ == "__main__":
    tag = release(pathlib.Path.cwd())
    print(f"{tag}: `git push origin {tag}` publishes it, `python -m build` makes sdist and wheel")
