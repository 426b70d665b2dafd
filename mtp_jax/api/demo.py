"""The location and the name of the embedded demo model."""

from pathlib import Path

DEMO = "demo"


def path_of(model: str | Path) -> Path:
    """The path of a model; "demo" is the demo model, unless there is a folder of that name."""
    return demo_model() if str(model) == DEMO and not Path(DEMO).exists() else Path(model)


def demo_model() -> Path:
    """The directory of the embedded demo model: in an installed package, or at the top of the repository."""
    package = Path(__file__).parent.parent
    inside, beside = package / "configs", package.parent / "configs"
    return (inside if inside.exists() else beside) / "demo"
