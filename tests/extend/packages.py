"""Packages as pip leaves them in a folder: modules, and a dist-info that names their entry points."""

from collections.abc import Mapping
from pathlib import Path

THIRD_PARTY = Path(__file__).parent / "thirdparty"
"""A whole package: a drafter, a head and a verifier."""


def lay(site: Path, package: str, points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str]) -> None:
    """Lay a package into a folder. points: by group, names to "module:attribute"; modules: text by file name."""
    for name, text in modules.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    info = site / f"{package.replace('-', '_')}-1.2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2.0\n", encoding="utf-8")
    lines = [
        line for group, named in points.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in named.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def lay_third_party(site: Path) -> None:
    """The package of ``thirdparty``, without pip."""
    files = sorted((THIRD_PARTY / "foretell_echo").glob("*.py"))
    lay(
        site,
        "foretell-echo",
        {
            "foretell.methods": {
                "echo": "foretell_echo.drafter:EchoConfig",
                "linear": "foretell_echo.head:LinearMethodConfig",
            },
            "foretell.heads": {"linear": "foretell_echo.head:LinearLayout"},
            "foretell.verifiers": {"direct": "foretell_echo.rule:Direct"},
        },
        {f"foretell_echo/{path.name}": path.read_text(encoding="utf-8") for path in files},
    )
