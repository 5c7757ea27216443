"""The console script ``contrastive-zoo``, also ``python -m contrastive_zoo``."""

import sys

from contrastive_zoo.testing.interrupts import uninterrupted


def main() -> None:
    """Run the command line.

    Raises:
        SystemExit: its extra is not installed; one line says which. It is interrupted.
    """
    try:
        with uninterrupted():
            from contrastive_zoo.testing.cli import main as run
        run()
    except ImportError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
