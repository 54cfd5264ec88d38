"""No file knows the machine it was written on, or where packages are fetched from."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = re.compile(r"(?<![\w.])/(work|tmp|home|root)/")
REGISTRIES = re.compile(r"pypi\.org|pythonhosted\.org|npmjs\.(com|org)|anaconda\.(com|org)|--(extra-)?index-url")


def project_files() -> list[Path]:
    """Files that git has or would add."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.parametrize("pattern", [FOLDERS, REGISTRIES], ids=["folders of a machine", "package registries"])
def test_no_file_names(pattern: re.Pattern[str]):
    files = [path for path in project_files() if path != Path(__file__)]
    assert len(files) > 50
    found = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()[:80]}"
        for path in files
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []
