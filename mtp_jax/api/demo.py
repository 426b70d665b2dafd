"""The location of the embedded demo model."""

from pathlib import Path


def demo_model() -> Path:
    """The directory of the embedded demo model: in an installed package, or at the top of the repository."""
    package = Path(__file__).parent.parent
    inside, beside = package / "configs", package.parent / "configs"
    return (inside if inside.exists() else beside) / "demo"
