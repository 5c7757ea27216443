"""The console script ``contrastive-zoo``, also ``python -m contrastive_zoo``."""

import sys


def main() -> None:
    """Run the command line.

    Raises:
        SystemExit: its extra is not installed; one line says which.
    """
    try:
        from contrastive_zoo.testing.cli import main as run
    except ImportError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
