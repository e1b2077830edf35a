"""Run the quick tests under every Python from 3.10 to 3.14 that this machine has, each in an environment of its own.

    python scripts/matrix.py
    python scripts/matrix.py 3.10 3.13 tests/test_cli.py    # some versions, and arguments for pytest

Environments are made in build/matrix from locks/dev.txt and kept. A version that is not here is said to be absent: the
exit code speaks only of those that are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def find(version: str) -> str | None:
    """An interpreter of a version: on the path, else among those that pyenv keeps."""
    candidates = [found] if (found := shutil.which(f"python{version}")) else []
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(path) for path in sorted(kept.glob(f"{version}.*/bin/python"))]
    return next((candidate for candidate in candidates if _is(candidate, version)), None)


def _is(python: str, version: str) -> bool:
    code = "import sys, venv, ssl; print('%d.%d' % sys.version_info[:2])"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return run.stdout.strip() == version


def environment(version: str, python: str) -> Path:
    """The interpreter of an environment with all that the tests need."""
    folder = ROOT / "build" / "matrix" / version
    ours = folder / "bin" / "python"
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip: list[str | Path] = [ours, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--require-hashes", "--requirement", ROOT / "locks" / "dev.txt"], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT], check=True)
    return ours


def main(arguments: list[str]) -> int:
    """0 where every version that is here passes."""
    results = {}
    wanted = [argument for argument in arguments if argument in VERSIONS]
    arguments = [argument for argument in arguments if argument not in VERSIONS]
    for version in wanted or VERSIONS:
        python = find(version)
        if python is None:
            results[version] = "absent"
            continue
        print(f"== Python {version}: {python}", flush=True)
        try:
            ours = environment(version, python)
        except subprocess.CalledProcessError as error:
            results[version] = f"FAILED: no environment ({error.returncode})"
            continue
        run = subprocess.run(
            [ours, "-m", "pytest", "-n", "auto", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        told = re.findall(r"^\d+ .*", run.stdout, re.M)
        results[version] = f"{'passed' if run.returncode == 0 else 'FAILED'}: {told[-1] if told else run.returncode}"
        if run.returncode:
            print(run.stdout[-5000:], flush=True)
    for version, result in results.items():
        print(f"{version:>5}  {result}")
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
