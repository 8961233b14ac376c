"""The laboratory of CacheMuon: models, data, training and the paper's experiments."""

import sys


def main() -> None:
    """The command `cachemuon`; where a package is missing it says in one line what to install."""
    try:
        from cachemuon_lab.cli import main as run
    except ModuleNotFoundError as error:
        how = "in a clone, pip install -c constraints.txt '.[lab]'"
        sys.exit(f"cachemuon: {error.name} is not installed: {how}")
    run()
