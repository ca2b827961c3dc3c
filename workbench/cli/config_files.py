"""Where the configuration files are."""

import pathlib

from workbench.errors import UserError


def config_dir() -> pathlib.Path:
    """The folder of the shipped configuration files: inside the wheel, else beside the package in a checkout."""
    package = pathlib.Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "train.yaml").is_file():
            return candidate
    raise UserError(f"no configuration files in {package / 'conf'}: the installation is incomplete, install workbench again.")
