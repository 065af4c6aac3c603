"""Renders a working plugin to start from.

python tools/new_plugin.py NAME [--kind arch|scheduler|drafter] [--into FOLDER]

NAME is what users will type: `glimmer` becomes the distribution `luce-arch-glimmer` (an architecture) or
`luce-glimmer` (anything else), with its hooks, README and tests, under plugins/.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "tools" / "plugin-template"
SUMMARIES = {
    "arch": "Serves {name} models with luce-core.",
    "scheduler": "The scheduler {name} for luce-core.",
    "drafter": "The drafter {name} for luce-core.",
}
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class BadName(ValueError):
    """The name cannot be one."""


def names(name: str, kind: str) -> dict[str, str]:
    """What the placeholders of the template become."""
    for prefix in ("luce-arch-", "luce-"):
        name = name.removeprefix(prefix)
    if not NAME.fullmatch(name) or name in ("core", "arch", "backend"):
        raise BadName(
            f"A plugin cannot be called {name!r}; wanted lower-case letters, digits and single hyphens, "
            "beginning with a letter, for example 'glimmer'."
        )
    distribution = f"luce-arch-{name}" if kind == "arch" else f"luce-{name}"
    return {
        "NAME": name,
        "SNAKE": name.replace("-", "_"),
        "CLASS": "".join(word.capitalize() for word in name.split("-")),
        "KIND": kind,
        "DISTRIBUTION": distribution,
        "MODULE": distribution.replace("-", "_"),
        "SUMMARY": SUMMARIES[kind].format(name=name),
    }


def render(name: str, kind: str, into: Path) -> Path:
    """Write the plugin into a new folder of `into`, and return that folder."""
    words = names(name, kind)
    folder = into / words["DISTRIBUTION"]
    if folder.exists():
        raise BadName(f"{str(folder)!r} exists already. Choose another name, or remove it.")
    for source in (TEMPLATE / "common", TEMPLATE / kind):
        for path in sorted(source.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                target = folder / fill(str(path.relative_to(source)), words)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(fill(path.read_text(encoding="utf-8"), words), encoding="utf-8")
    return folder


def fill(text: str, words: dict[str, str]) -> str:
    """Replace every @PLACEHOLDER@."""
    return re.sub(r"@([A-Z]+)@", lambda found: words[found[1]], text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", metavar="NAME", help="what users will type, for example glimmer")
    parser.add_argument("--kind", choices=sorted(SUMMARIES), default="arch", help="what it provides")
    parser.add_argument("--into", type=Path, default=ROOT / "plugins", help="where its folder goes")
    given = parser.parse_args(arguments)
    try:
        folder = render(given.name, given.kind, given.into)
    except BadName as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{folder} is there. Next:\n  pip install -e {folder}\n  pytest {folder}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
